#!/bin/bash
# run.sh FOLDER OUT: parts serving (<= 190 s), soak (<= 155 s), by ONLY; each on one H200. BARS: the folder with common.sh
given=$1; bars=${BARS:-$(dirname "$(realpath "$1")")/bars}
[ -e "$bars/common.sh" ] || { echo "no $bars/common.sh; pass BARS"; exit 1; }
. "$bars/common.sh" "$bars" "$2"
mine=$(cd "$root" && realpath "$given")
LINES_SHOWN=${LINES_SHOWN:-6}
part serving ${SERVING:-190} $py -m benchmarks serving --peers xla,cudnn,flash_attn3,torch_cudnn --seconds $(( ${SERVING:-190} - 15 )) --out $out/serving
timeout 30 $py $mine/tell.py $out > $out/serve46.told; head -c 20000 $out/serve46.told
export XLA_PYTHON_CLIENT_PREALLOCATE=false
part soak ${SOAK:-155} $py -m benchmarks soak --streams 4 --seconds $(( ${SOAK:-155} - 55 )) --texts 8 --out $out/soak

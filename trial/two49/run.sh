#!/bin/bash
# run.sh FOLDER OUT: issue 49 on two H200s of one host; <= 560 s, the most valuable first, a line for each measurement.
# In the root of a copy of main. FOLDER may hold fa3.tar.xz (flash-attn3-jax and einops), else its ring is left out.
set -uo pipefail
folder=$1 out=$2; mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2 XLA_PYTHON_CLIENT_PREALLOCATE=false
[ -f "$folder/fa3.tar.xz" ] && mkdir -p /tmp/fa3 && tar -C /tmp/fa3 -xJf "$folder/fa3.tar.xz" && export PYTHONPATH=$PWD:/tmp/fa3
begin=$(date +%s) total=${TOTAL:-560}
left() { echo $((total - $(date +%s) + begin)); }
say() { echo "=== $* at $(($(date +%s) - begin)) s"; }
# limit SECONDS COMMAND...: at most SECONDS, and no longer than what is left.
limit() { local s=$1 l; shift; l=$(left); [ "$l" -lt 15 ] && { say "no time for $*"; return; }; timeout -k 3 $((s < l ? s : l)) "$@" 2>&1 | grep --line-buffered -v "^[WEI][0-9]\{4\} "; }
bars() { say "$1"; limit "$2" python3 -m benchmarks parallel --case "$1" ${TINY:+--tiny} --out "$out/bars" | tee -a "$out/table.txt"; }
extra() { say "extra $1"; limit "$2" python3 "$folder/extra.py" "$1" "$out" | tee -a "$out/table.txt"; }
nvidia-smi topo -m > "$out/topology.txt" 2>&1
bars data 190
bars tensor 70
bars context 90
bars "context window" 75
bars fsdp 120
# Explicit axes at 1, 8 and 64 rows a device: every operator, numbers against one device.
say explicit
XLA_FLAGS='--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false' limit 100 \
  python3 -m pytest -q -p no:cacheprovider -n 14 -m gpu tests/every_operator/test_two_gpus.py --tb=line -rf | tail -25 | tee "$out/explicit.txt"
# What could reach a missed bar, and is not in the library.
extra "context window" 55
extra tensor 40
extra data 80
say end

#!/bin/bash
# Four GPUs, 240 s: run4.sh FOLDER OUT. Scaling of FSDP, windowed attention, the gated MLP and ViT-B on 1, 2 and 4 GPUs.
set -uo pipefail
here=$(realpath "$1"); out=$(realpath -m "${2:-/tmp/scale38}"); mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
timeout -s KILL 237 python "$here/scale.py" "$out" ${SECONDS_LEFT:-228} 2>&1 | tee "$out/table.txt"
exit 0

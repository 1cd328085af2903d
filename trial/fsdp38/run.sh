#!/bin/bash
# Two GPUs, 240 s: run.sh FOLDER OUT. FSDP of lm-1b by several designs, each against one GPU.
set -uo pipefail
here=$(realpath "$1"); out=$(realpath -m "${2:-/tmp/fsdp38-out}"); mkdir -p "$out"
rm -rf /tmp/fsdp38 && mkdir /tmp/fsdp38 && cp -r benchmarks examples jaxfused pallas_kernels /tmp/fsdp38/
cd /tmp/fsdp38 && patch -s -p1 < "$here/x.patch" || { echo "the patch does not fit"; exit 1; }
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
timeout -s KILL 236 python "$here/trial.py" "$out" ${SECONDS_LEFT:-226} 2>&1 | tee "$out/table.txt"
rm -f "$out"/*.hlo; find "$out" -name '*.err' -size +60k -delete
exit 0

#!/bin/bash
# Two GPUs, 100 s, may run beside run.sh on two other GPUs: options.sh FOLDER OUT.
set -uo pipefail
here=$(realpath "$1"); out=$(realpath -m "${2:-/tmp/options38}"); mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TF_CPP_MIN_LOG_LEVEL=2 XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -s KILL ${TOTAL:-110} python "$here/options.py" "$out" 2>&1 | grep --line-buffered -v "^[WEI][0-9]\{4\} " | tee "$out/table.txt"
exit 0

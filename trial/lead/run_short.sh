#!/bin/bash
# run_short.sh FOLDER OUT: issue 49 on two H200s of one host, at most TOTAL=290 s; a line for each measurement.
# In the root of a copy of main. FOLDER may hold fa3.tar.xz (flash-attn3-jax and einops), else its ring is left out.
set -uo pipefail
folder=$(realpath "$1") out=$2; mkdir -p "$out"; out=$(realpath "$out")
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2 XLA_PYTHON_CLIENT_PREALLOCATE=false
# NVLink multicast stays off.
export NCCL_NVLS_ENABLE=0
total=${TOTAL:-290}
[ -f "$folder/fa3.tar.xz" ] && mkdir -p /tmp/fa3 && tar -C /tmp/fa3 -xJf "$folder/fa3.tar.xz" && export PYTHONPATH=$PWD:/tmp/fa3
[ -n "${TINY:-}" ] || nvidia-smi topo -m > "$out/topology.txt" 2>&1 &
timeout -k 5 $((total + 3)) python3 "$folder/short.py" "$folder" "$out" "$total"

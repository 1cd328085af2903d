#!/bin/bash
# $1: this folder, $2: results. 90 s, one GPU.
rm -rf /tmp/b32; mkdir -p /tmp/b32 $2; cp -r jaxfused pallas_kernels benchmarks tests pyproject.toml /tmp/b32/ && cd /tmp/b32
[ -f $1/b32.patch ] && { git apply --include='jaxfused/*' --include='pallas_kernels/*' $1/b32.patch || patch -p1 < $1/b32.patch; }
export PYTHONPATH=/tmp/b32 TF_CPP_MIN_LOG_LEVEL=2 XLA_PYTHON_CLIENT_PREALLOCATE=true XLA_PYTHON_CLIENT_MEM_FRACTION=0.85
timeout 89 python $1/trial.py --out $2/trial.json --budget ${BUDGET:-80} 2>&1 | grep --line-buffered -v "^W[0-9]\|^I[0-9]\|^E[0-9]" | tee $2/trial.txt

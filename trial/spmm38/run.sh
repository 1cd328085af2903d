#!/bin/bash
# $1: this folder, $2: results. 90 s.
export PYTHONPATH=$PWD TF_CPP_MIN_LOG_LEVEL=2 XLA_PYTHON_CLIENT_PREALLOCATE=true XLA_PYTHON_CLIENT_MEM_FRACTION=0.6
mkdir -p /tmp/spmm38; for t in 128 512 1024; do xz -dc $1/csr$t.so.xz > /tmp/spmm38/csr$t.so; done
if nm -D jaxfused/runtime/libjaxfused.so | grep -q jaxfused_csr_starts; then
  timeout 25 python -m pytest -q -p no:cacheprovider -m gpu tests/ops/sparse/test_sparse_matmul.py 2>&1 | tail -15 | tee $2/tests.txt
fi
timeout 66 python $1/trial.py /tmp/spmm38/csr128.so /tmp/spmm38 2>&1 | grep --line-buffered -v "^W[0-9]\|^I0\|^E0\|UserWarning\|return torch\|run = lambda" | tee $2/trial.txt

#!/bin/bash
# $1: this folder, $2: results. 90 s.
export PYTHONPATH=$PWD TF_CPP_MIN_LOG_LEVEL=2 XLA_PYTHON_CLIENT_PREALLOCATE=true XLA_PYTHON_CLIENT_MEM_FRACTION=0.85
xz -dc $1/main.so.xz > /tmp/gemv_main.so; xz -dc $1/more.so.xz > /tmp/gemv_more.so
timeout 89 python $1/trial.py /tmp/gemv_main.so /tmp/gemv_more.so $2/trial.json --budget 80 2>&1 | grep --line-buffered -v "^W0\|^I0\|^E0" | tee $2/trial.txt

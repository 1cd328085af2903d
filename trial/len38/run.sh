#!/bin/bash
# $1: this folder, $2: results. 90 s, one GPU; in the root of a copy of main.
here=$(realpath $1); out=$(mkdir -p $2 && realpath $2)
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2 ABSL_MIN_LOG_LEVEL=2
xz -dc $here/len38.so.xz > /tmp/len38.so
timeout -k 3 ${SECONDS_MOST:-88} ${PYTHON:-python3} $here/trial.py $out/len38.json ${LIMIT:-76} /tmp/len38.so 2>&1 | grep --line-buffered -v "^[WIE][0-9]" | tee $out/len38.txt

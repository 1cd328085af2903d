#!/bin/bash
# run.sh FOLDER OUT: at most 78 s on one H200, from the root of a copy of main (33e3646a or later) with the CUDA library
given=$(realpath "$1"); out=$(mkdir -p "$2" && realpath "$2"); py=${PYTHON:-python3}
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=3 PYTHONPATH=$PWD
timeout -k 3 ${NEW:-75} $py "$given/trial.py" new 2>&1 | grep --line-buffered -v "^[WIE][0-9]" | tee "$out/new.log"

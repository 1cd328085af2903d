#!/bin/bash
# run.sh FOLDER OUT: 70 s, one GPU. main, then main with x.patch: bits equal? us of attention with query offsets (must 1.03 of "none"; 1.036 to 1.040 before).
here=$(realpath "$1"); out=$(realpath "$2"); root=$PWD; rm -rf /tmp/off39; mkdir /tmp/off39; cp -r jaxfused pallas_kernels /tmp/off39/; (cd /tmp/off39 && patch -s -p1 < $here/x.patch) || exit 1
export TF_CPP_MIN_LOG_LEVEL=3 XLA_PYTHON_CLIENT_PREALLOCATE=false
PYTHONPATH=$root timeout 34 python3 $here/trial.py old /tmp/off39 2>&1 | grep --line-buffered -v "^[WIE][0-9]"
cd /tmp/off39 && PYTHONPATH=$PWD timeout 34 python3 $here/trial.py new /tmp/off39 2>&1 | grep --line-buffered -v "^[WIE][0-9]"

#!/bin/bash
# run.sh FOLDER OUT: 75 s, one GPU.
here=$(realpath $1); export TF_CPP_MIN_LOG_LEVEL=3 XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout ${SECONDS_GIVEN:-100} python3 $here/race.py $here $2 90 2>&1 | grep --line-buffered -v "^[WIE][0-9]"

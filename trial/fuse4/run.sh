#!/bin/bash
# run.sh FOLDER OUT: one GPU, 75 s, in the root of a copy of main. Losses and gates that fuse finds since 29 November.
timeout 75 ${PYTHON:-python3} "$1/check.py" 2>&1 | tee "$2/fuse4.txt"

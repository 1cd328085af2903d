#!/bin/bash
# run.sh FOLDER OUT SECONDS (130): the kernel of caches of branch dec, see READY
D=$1; O=$2; L=${3:-130}
rm -rf /tmp/clus39; mkdir -p /tmp/clus39; cp -r . /tmp/clus39/repo; cd /tmp/clus39/repo; patch -p1 < $D/jaxfused.patch
xz -dc $D/clus.so.xz > /tmp/clus39/clus.so
export PYTHONPATH=$PWD TF_CPP_MIN_LOG_LEVEL=3 XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout $L python $D/trial.py /tmp/clus39/clus.so $L 2>&1 | grep --line-buffered -v "^[WIE][01]" | tee $O/clus.txt | tail -80

#!/bin/bash
# $1: this folder, $2: results. 150 s.
D=$1; O=$2; S=$(date +%s)
rm -rf /tmp/gemv3; mkdir -p /tmp/gemv3; cp -r . /tmp/gemv3/repo; cd /tmp/gemv3/repo
[ -e jaxfused/ops/quantized/few_rows_cuda.py ] || tar xzf $D/changed.tgz
xz -dc $D/few.so.xz > /tmp/gemv3/few.so
export PYTHONPATH=$PWD:$D FEW_SO=/tmp/gemv3/few.so TF_CPP_MIN_LOG_LEVEL=3 XLA_PYTHON_CLIENT_PREALLOCATE=false
q() { grep --line-buffered -v "^W[01]\|^I[01]\|^E[01]"; }
(timeout 95 python $D/trial.py $O/trial.json /tmp/gemv3/flag --budget 42 2>&1 | q > $O/trial.txt) &
T=$!
XLA_FLAGS='--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false' timeout -s INT 40 python -m pytest -v -n 8 --tb=short -p no:cacheprovider -p few_plugin -m gpu tests/ops/quantized/test_few_rows_cuda.py > $O/tests.txt 2>&1
touch /tmp/gemv3/flag
tail -1 $O/tests.txt; grep "FAILED\|ERROR" $O/tests.txt | head -12
wait $T
cat $O/trial.txt
for f in force none; do
  L=$((148 - $(date +%s) + S)); [ $L -gt 30 ] || break
  echo "--- decode, int4 by $f"
  mkdir -p $O/$f
  timeout $L python -c "
import few_plugin
if '$f' == 'force': import force
from benchmarks.whole import language_model as l
raise SystemExit(l.main(['decode', '--only', 'b1 int4', '--out', '$O/$f', '--seconds', '$L']))" 2>&1 | q | tail -8
done

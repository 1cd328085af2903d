#!/bin/bash
# run.sh FOLDER OUT: at most 60 s. CASES (default "swin own t5 own128 vit196"; the last may be cut) now and before in turn on the first GPU,
# at most 30 s each; beside it, where there is a second GPU, tests of low biases and configs of the forward.
# With one GPU: times only, and with EXTRA=1 these two afterwards (at most 58 s more).
export PYTHONPATH=$PWD
CASES=${CASES:-swin own t5 own128 vit196}
IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}"
rm -rf /tmp/bias43; mkdir /tmp/bias43
for x in jaxfused pallas_kernels benchmarks pyproject.toml; do cp -r $x /tmp/bias43/; done
(cd /tmp/bias43 && patch -p1 -s < $1/before.patch) || { echo "before.patch does not apply: only times of now"; rm -rf /tmp/bias43; }
extra() {
  timeout 40 python3 -m pytest -q -p no:cacheprovider -m gpu -k pallas tests/ops/attention/test_low_biases.py > $2/tests.txt 2>&1
  timeout 18 python3 $1/configs.py > $2/configs.txt 2>&1
}
[ ${#gpus[@]} -gt 1 ] && (export CUDA_VISIBLE_DEVICES=${gpus[1]}; extra "$@") &
export CUDA_VISIBLE_DEVICES=${gpus[0]}
timeout 30 python3 $1/times.py now $CASES > $2/now.txt 2>&1; cat $2/now.txt
[ -d /tmp/bias43 ] && (cd /tmp/bias43 && PYTHONPATH=$PWD timeout 30 python3 $1/times.py before $CASES) > $2/before.txt 2>&1; cat $2/before.txt
wait
[ ${#gpus[@]} -gt 1 ] || [ -z "$EXTRA" ] || extra "$@"
[ -f $2/configs.txt ] && cat $2/configs.txt; [ -f $2/tests.txt ] && tail -5 $2/tests.txt

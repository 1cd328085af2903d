#!/bin/bash
# run.sh FOLDER OUT: tests (at most 150 s), then times now and before in turn (at most 2 x 55 s).
export PYTHONPATH=$PWD
timeout 150 python3 -m pytest -q -p no:cacheprovider -m gpu tests/ops/attention/test_low_biases.py > $2/tests.txt 2>&1
tail -5 $2/tests.txt
cp -r . /tmp/bias43 && (cd /tmp/bias43 && patch -p1 -R -s < $1/change.patch) || echo "the patch of the change does not come off: only times of now"
timeout 55 python3 $1/times.py now | tee $2/now.txt
[ -d /tmp/bias43 ] && (cd /tmp/bias43 && PYTHONPATH=$PWD timeout 55 python3 $1/times.py before) | tee $2/before.txt

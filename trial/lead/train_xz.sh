#!/bin/bash
# train_xz.sh OUT [SECONDS]: examples/lm on Python's own library: bits a byte beside xz, samples that parse.
out=$1 limit=${2:-75} python=${PYTHON:-python3}
# 640 steps of 64 rows of 1,024 bytes, 42 million bytes of a text of about 11; the defaults take CPU minutes.
timeout $limit $python -m examples.lm.train --out /tmp/train_xz/train-xz --model ${MODEL:-lm-12m} --length ${LENGTH:-1024} \
  --batch-size ${BATCH:-64} --epoch-rows ${ROWS:-8192} --epochs ${EPOCHS:-5} --evaluate-every 4 --checkpoint-every 4 --learning-rate 2e-3 \
  --samples ${SAMPLES:-50} >"$out/train-xz.txt" 2>&1
echo "train-xz: exit status $?"; tr '\r' '\n' <"$out/train-xz.txt" | cut -c1-300 | tail -n 8
cp /tmp/train_xz/train-xz/{metrics.json,samples.txt} "$out/" 2>/dev/null

#!/bin/bash
# run2.sh FOLDER OUT: one GPU, 520 s: training of 1.3 B, ViT-S from JPEG, a 7 B checkpoint, lengths in the schedule.
. "$1/common.sh"
part train 178 $py -m benchmarks language_model train --seconds 168 --out $out/train
part jla_bf16 98 bash $here/jla13b.sh $out bf16 94
part pipeline 92 $py -m benchmarks pipeline --workers 14 --seconds 82 --out $out/pipeline
part checkpoint 62 $py -m benchmarks checkpoint --seconds 52 --out $out/checkpoint
rm -rf /tmp/bars_lengths && mkdir /tmp/bars_lengths && cp -r jaxfused pallas_kernels benchmarks pyproject.toml /tmp/bars_lengths/ && (cd /tmp/bars_lengths && patch -s -p1 < $here/lengths.patch) || echo "lengths.patch failed"
part lengths_today 44 $py $here/lengths.py today $out/lengths.json
(cd /tmp/bars_lengths && export PYTHONPATH=/tmp/bars_lengths:/tmp/bars_site && part lengths_patched 44 $py $here/lengths.py patched $out/lengths.json)

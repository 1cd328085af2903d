#!/bin/bash
# run3.sh FOLDER OUT: one GPU, 520 s: what is left or only confirms.
. "$1/common.sh"
mkdir -p /tmp/bars_so && xz -dc $here/decode8.so.xz > /tmp/bars_so/all.so
LINES_SHOWN=40 part decode8 62 $py $here/decode8.py /tmp/bars_so 60
part soak 190 $py -m benchmarks soak --streams 4 --seconds 130 --texts 8 --batch-invariant --out $out/soak
part jla_fp8 98 bash $here/jla13b.sh $out fp8 94
part train_xz 80 bash $here/train_xz.sh $out 76
part documents 45 $py $here/documents.py ours
part sample 42 $py -m benchmarks sample --peers xla --seconds 32 --out $out/sample

#!/bin/bash
# $1 this folder, $2 for results; SECONDS_GIVEN of one card (default 120). PART=0/2 and PART=1/2 divide the cases
# between two cards (CUDA_VISIBLE_DEVICES); WORKERS x THREADS cases compile at once (16 cores).
IN=$(cd "$1" && pwd); mkdir -p "$2"; OUT=$(cd "$2" && pwd)
T=${SECONDS_GIVEN:-120}
D=$(mktemp -d); tar xJf "$IN/modules.tar.xz" -C $D; cp "$IN/cases.jsonl" $D/
PYTHONPATH=$PWD timeout -k 3 $T python3 "$IN/race.py" $D "$OUT" $((T-5)) 2>"$OUT/stderr" | tee "$OUT/report"
tail -c 600 "$OUT/stderr"
python3 "$IN/decide.py" "$OUT/results.jsonl" | tee "$OUT/decide"
for f in "$OUT"/worker.*; do tail -c 3000 "$f"; done > "$OUT/workers.tail"; rm -f "$OUT"/worker.[0-9a]*; rm -rf $D

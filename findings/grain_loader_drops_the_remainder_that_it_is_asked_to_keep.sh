#!/usr/bin/env bash
# What: A grain.DataLoader over one epoch leaves records out although its ShardOptions say drop_remainder=False.
#
# Version: grain==0.2.18; a CPU, Python 3.12 or newer.
# Expected: Each record once in one of the shards: the documentation of drop_remainder=False distributes the
#   remainder over the first shards, and it is the default.
# Seen: Of 10 records in 3 shards record 3 is read by none, of 11 in 4 shards records 2, 5 and 8, nor is a warning
#   given. The sampler does give them to the first shards, but the loader ends each shard after the size of the
#   smallest one. With two epochs the first shard reads 0 1 2 3 0 1. Evaluation over hosts is of a part of the
#   data set, another one for each number of hosts.
# In jaxfused: It loads no data; its examples read theirs by indices of their own.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile grain==0.2.18

"$folder/venv/bin/python" - <<'PYTHON'
import grain


def epoch(records, shards, epochs=1):
    read = []
    for shard in range(shards):
        options = grain.sharding.ShardOptions(shard_index=shard, shard_count=shards, drop_remainder=False)
        sampler = grain.samplers.IndexSampler(records, options, shuffle=False, num_epochs=epochs)
        source = list(range(records))
        read.append(list(grain.DataLoader(data_source=source, sampler=sampler, worker_count=0)))
    return read


for records, shards, missing in ((9, 3, set()), (10, 3, {3}), (11, 4, {2, 5, 8})):
    read = epoch(records, shards)
    left = set(range(records)) - {record for shard in read for record in shard}
    print(records, "records in", shards, "shards:", read, "left out:", left)
    assert left == missing
print("two epochs:", epoch(10, 3, epochs=2)[0])
assert epoch(10, 3, epochs=2)[0] == [0, 1, 2, 3, 0, 1]
PYTHON

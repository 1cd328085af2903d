# lanes.sh FOLDER-OF-ALL LANES SECONDS: jobs on two GPUs at once. LANES: lines "GPU NAME SECONDS COMMAND...", those of one GPU run one
# after the other; GPU "both" runs when both lanes have ended. Each job: its own folder of results, its own timeout, all.tgz after each.
B=$1; lanes=$2; limit=$3; R=/tmp/res; mkdir -p $R /tmp/bin; T0=$(date +%s); ROOT=$PWD
command -v python >/dev/null || { printf '#!/bin/bash\nexec python3 "$@"\n' > /tmp/bin/python; chmod +x /tmp/bin/python; export PATH=/tmp/bin:$PATH; }
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 B
now() { echo $(( $(date +%s) - T0 )); }
save() { (flock 9; tar -C $R -czf $OUT/all.tgz.new . 2>/dev/null; mv $OUT/all.tgz.new $OUT/all.tgz) 9>/tmp/save.lock; }
lane() {
  while read -r gpu name seconds command; do
    [ "$gpu" = "$1" ] || continue
    left=$(( limit - $(now) )); [ $left -lt 15 ] && { echo "=== $name not begun"; continue; }
    [ $seconds -gt $left ] && seconds=$left
    mkdir -p $R/$name; begun=$(now)
    if [ $gpu = both ]; then unset CUDA_VISIBLE_DEVICES; else export CUDA_VISIBLE_DEVICES=$gpu; fi
    N=$name O=$R/$name timeout -s INT -k 10 $seconds bash -c "$command" < /dev/null > $R/$name/log.txt 2>&1; rc=$?
    echo "=== $name (GPU $gpu) rc $rc, from $begun to $(now)"; tail -c ${TAIL:-1500} $R/$name/log.txt; save
  done < <(grep -v '^#' $lanes)
}
lane 0 > /tmp/lane0 2>&1 & L0=$!
lane 1 > /tmp/lane1 2>&1 & L1=$!
wait $L0 $L1; cat /tmp/lane0 /tmp/lane1
lane both
echo "=== end $(now)"; save

# lanes4.sh FOLDER-OF-ALL LANES SECONDS: jobs on several GPUs at once. LANES: lines "LANE GPUS NAME SECONDS COMMAND..."; the jobs of a lane run one
# after the other, lanes beside each other; lane "end" when all others have ended. Each job: its own folder of results, its own timeout, all.tgz after each.
B=$1; lanes=$2; limit=$3; R=/tmp/res; mkdir -p $R /tmp/bin; T0=$(date +%s)
command -v python >/dev/null || { printf '#!/bin/bash\nexec python3 "$@"\n' > /tmp/bin/python; chmod +x /tmp/bin/python; export PATH=/tmp/bin:$PATH; }
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 B R
now() { echo $(( $(date +%s) - T0 )); }
save() { (flock 9; tar -C $R -czf $OUT/all.tgz.new . 2>/dev/null; mv $OUT/all.tgz.new $OUT/all.tgz) 9>/tmp/save.lock; }
lane() {
  while read -r l gpus name seconds command; do
    [ "$l" = "$1" ] || continue
    left=$(( limit - $(now) )); [ $left -lt 15 ] && { echo "=== $name not begun"; continue; }
    [ $seconds -gt $left ] && seconds=$left
    mkdir -p $R/$name; begun=$(now); export CUDA_VISIBLE_DEVICES=$gpus
    N=$name O=$R/$name timeout -s INT -k 10 $seconds bash -c "$command" < /dev/null > $R/$name/log.txt 2>&1; rc=$?
    touch /tmp/$name.ended
    echo "=== $name (GPU $gpus) rc $rc, from $begun to $(now)"; tail -c ${TAIL:-1500} $R/$name/log.txt; save
  done < <(grep -v '^#' $lanes)
}
all=$(grep -v '^#' $lanes | awk '$1 != "end" {print $1}' | sort -u)
for l in $all; do lane $l > /tmp/lane.$l 2>&1 & done; wait; for l in $all; do cat /tmp/lane.$l; done
lane end
echo "=== end $(now)"; nproc; save

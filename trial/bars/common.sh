# sourced by run*.sh: FOLDER OUT; part NAME SECONDS COMMAND...
here=$(realpath "$1") out=$(mkdir -p "$2" && realpath "$2"); root=$PWD
T0=$(date +%s); py=${PYTHON:-python3}
# Two lists may begin at the same time, a GPU each.
flock /tmp/bars_site.lock bash -c '[ -e /tmp/bars_site/ready ] || { mkdir -p /tmp/bars_site && tar xJf "$0" -C /tmp/bars_site && touch /tmp/bars_site/ready; }' "$here/site.tar.xz"
export PYTHONPATH=$root:/tmp/bars_site PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2 ABSL_MIN_LOG_LEVEL=2
part() {
  local name=$1 seconds=$2; shift 2
  [ -z "$ONLY" ] || [[ " $ONLY " = *" $name "* ]] || return
  echo "=== $name at $(( $(date +%s) - T0 )) s, at most $seconds s"
  timeout -k 4 $seconds "$@" > "$out/$name.log" 2>&1
  echo "=== $name ended with $? at $(( $(date +%s) - T0 )) s"
  grep -v "^[WIE][0-9]\|Autotuning cache miss\|^WARNING\|Warning" "$out/$name.log" | grep -v "^[│┃┡┏└]" | cut -c1-260 | tail -n ${LINES_SHOWN:-14}
}

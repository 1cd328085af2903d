# sass.sh SO PATTERN OUT
PATH=/tmp/kept48/dis2/nvidia/cu13/bin:$PATH /tmp/kept48/dis/nvidia/cu13/bin/cuobjdump -sass $1 | awk -v p="$2" '/Function :/{on=index($0,p)>0} on' | grep -E "^\s+/\*[0-9a-f]{4,5}\*/" | sed 's/^\s*\/\*\([0-9a-f]*\)\*\/\s*/\1 /; s/\/\*.*//' > $3
wc -l $3

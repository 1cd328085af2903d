#!/bin/bash
# run a command ahead of everything else on this machine (the lead's builds and tests only)
mkdir -p /sys/fs/cgroup/cpu/build; echo ${SHARES:-100000} > /sys/fs/cgroup/cpu/build/cpu.shares
echo $$ > /sys/fs/cgroup/cpu/build/cgroup.procs
exec "$@"

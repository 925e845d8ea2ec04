#!/bin/sh
# Kills what is left of a server and removes its shared memory and files, even if the process that started both was
# killed. Then no server keeps the ports and no hanging stub outlives its tritonserver. Arguments: process group, prefix
# of the shared memory regions, seconds of grace, temporary directory. A line on stdin: the server was stopped; end of
# file: the parent is dead. (Not PR_SET_PDEATHSIG: that needs a fork, and gRPC's fork handlers occasionally abort the
# child.)
if ! read -r _; then
    kill -s TERM "$1"
    while [ "$3" -gt 0 ] && kill -s 0 -- "-$1"; do sleep 1; set -- "$1" "$2" $(($3 - 1)) "$4"; done
fi
kill -s KILL -- "-$1"
rm -f /dev/shm/"$2"*
rm -rf "$4"

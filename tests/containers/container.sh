#!/usr/bin/env bash
# Runs a command under a container's conditions, for without_docker.py. As root:
#
#   container.sh run VOLUME SHM_SIZE WORKING_DIRECTORY COMMAND ...
#   container.sh exec PROCESS WORKING_DIRECTORY COMMAND ...          in the container of the first form's process
#
# User 1001 without capabilities; process 1 passes SIGTERM on; of the devices only a GPU's; all is read-only but /models,
# which is VOLUME, /tmp and /dev/shm. The clone is the image's working directory.
set -euo pipefail
as_user=(setpriv --reuid 1001 --regid 1001 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all)
case $1 in
    run) shift; exec unshare --mount --pid --ipc --uts --fork --kill-child "$0" inside "$@" ;;
    exec)
        # shellcheck disable=SC2016  # for the inner shell
        exec nsenter --target="$2" --mount --ipc --pid="/proc/$2/ns/pid_for_children" "${as_user[@]}" \
            bash -c 'cd "$1" && shift && exec "$@"' exec "${@:3}" ;;
esac
shift
clone=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
home=/opt/cosyvoice-triton
mount --make-rprivate /
mkdir -p /models "$home"
mount --bind "$1" /models
mount --bind "$clone" "$home"
files=$(mktemp -d)
{ cat /etc/passwd; echo tts:x:1001:1001::/home/tts:/bin/bash; } >"$files/passwd"
echo 127.0.0.1 localhost tts speech gateway >"$files/hosts"
for name in passwd hosts; do mount --bind "$files/$name" "/etc/$name"; done
mount -t tmpfs -o mode=755 dev /mnt
for file in /dev/{null,zero,full,random,urandom,tty,nvidia[0-9]*,nvidiactl,nvidia-uvm*}; do
    [[ ! -c $file ]] || { : >"/mnt/${file##*/}"; mount --bind "$file" "/mnt/${file##*/}"; }
done
mkdir /mnt/shm
mount -t tmpfs -o mode=1777,size="$2" shm /mnt/shm
mount --move /mnt /dev
ln -s /proc/self/fd /dev/fd
mount -t tmpfs -o mode=1777,exec tmp /tmp
mount -t proc proc /proc
while read -r _ _ _ _ point _; do
    [[ $point =~ ^/(proc|dev|models|tmp)(/|$) ]] || mount -o remount,bind,ro "$point" || echo "not read-only: $point"
done </proc/self/mountinfo
cd "$3"
shift 3
# shellcheck disable=SC2016  # for the inner shell
init='trap "kill -TERM \$!" TERM; "$@" & until wait $!; do code=$?; kill -0 $! || exit $code; done 2>&-'
exec "${as_user[@]}" bash -c "$init" init "$@"

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a command in which programs of 64-bit ARM Linux run, also those that it starts, on another processor by qemu:
#
#   scripts/run_aarch64.sh build/aarch64/anyrank check --model stack-demo
#   scripts/run_aarch64.sh --check                     whether this machine can: exit status 0, or 2 and why not
#
# The programs are those of `scripts/build.sh aarch64`, with the libraries that `scripts/install_deps.sh --aarch64`
# unpacked. An ARM machine runs them as they are. Elsewhere the kernel is asked to start them by qemu, in a namespace
# that ends with the command (Linux 6.7 or newer): nothing of the machine is changed, and root is not needed.
set -eu
sysroot=$(cd "$(dirname "$0")/.." && pwd -P)/build/aarch64/sysroot
register=/proc/sys/fs/binfmt_misc
# The first bytes of a program: ELF, 64 bits, least significant byte first, executable or shared, for machine 183.
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'

refuse() {
    echo "run_aarch64.sh: $1" >&2
    exit 2
}

if [ "${1:-}" = --inside ]; then
    mount -t binfmt_misc none $register
    # F: qemu is opened now, whatever a program that starts others does to what it sees of files.
    printf ':anyrank-aarch64:M::%s:%s:%s:F\n' "$magic" "$mask" "$2" > $register/register
    shift 2
    exec "$@"
fi
[ $# -gt 0 ] || { sed -n '3,10s/^# \{0,1\}//p' "$0"; exit 2; }
if [ "$(uname -m)" = aarch64 ]; then
    [ "$1" = --check ] || exec "$@"
    exit 0
fi
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) ||
    refuse "no qemu-aarch64 here: scripts/install_deps.sh --aarch64 installs it"
[ -e "$sysroot/lib/ld-linux-aarch64.so.1" ] ||
    refuse "no libraries of arm64 in $sysroot: scripts/install_deps.sh --aarch64 puts them there"
export QEMU_LD_PREFIX="$sysroot"
if [ -e $register/qemu-aarch64 ]; then # Debian's package has asked the kernel already
    inside=''
else
    inside="unshare --user --map-root-user --mount sh $0 --inside $qemu"
fi
if [ "$1" = --check ]; then
    # Unquoted on purpose: a command and its arguments.
    # shellcheck disable=SC2086
    $inside true 2>/dev/null || refuse "this kernel lets no user have programs started by qemu; Linux 6.7 does"
    exit 0
fi
# shellcheck disable=SC2086
exec $inside "$@"

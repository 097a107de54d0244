#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs 2 + 2 processes on two hosts that this machine pretends to have: two network namespaces, joined by a cable of
# their own (veth), with TCP between them and no shared memory. Open MPI; needs root. Exit status 77: not possible here.
#
#     tests/mpi/two_hosts.sh PROGRAM [ARGUMENTS]
set -eu
skip() {
    echo "$1"
    exit 77
}
[ $# -gt 0 ] || { echo "usage: two_hosts.sh PROGRAM [ARGUMENTS]" >&2; exit 2; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
launcher=$(command -v mpirun.openmpi || command -v mpirun) || skip "there is no mpirun here"
"$launcher" --version 2>/dev/null | grep -q -e "Open MPI" -e OpenRTE || skip "two hosts are tried with Open MPI"
command -v ip >/dev/null || skip "there is no ip command here"
[ "$(id -u)" = 0 ] || skip "network namespaces need root"

name=anyrank$$
folder=$(mktemp -d)
cleanup() {
    ip netns delete "$name-a" 2>/dev/null || :
    ip netns delete "$name-b" 2>/dev/null || :
    rm -rf "$folder"
}
trap cleanup EXIT INT TERM
ip netns add "$name-a" 2>/dev/null || skip "network namespaces are not permitted here"
ip netns add "$name-b"
ip link add "ar$$a" netns "$name-a" type veth peer name "ar$$b" netns "$name-b" 2>/dev/null ||
    skip "a pair of network devices is not permitted here"
for side in a b; do
    [ "$side" = a ] && address=10.77.0.1 || address=10.77.0.2
    ip -n "$name-$side" address add "$address/24" dev "ar$$$side"
    ip -n "$name-$side" link set "ar$$$side" up
    ip -n "$name-$side" link set lo up
done

# What takes the place of ssh: the second host is the second namespace, with a name of its own.
cat >"$folder/agent" <<END
#!/bin/sh
shift # the host
exec ip netns exec $name-b unshare --uts sh -c 'hostname second && exec "\$@"' sh sh -c "\$*"
END
chmod +x "$folder/agent"
TMPDIR=$folder ip netns exec "$name-a" unshare --uts sh -c 'hostname first && exec "$@"' sh \
    "$launcher" --host 10.77.0.1:2,10.77.0.2:2 -n 4 --map-by node --mca plm_rsh_agent "$folder/agent" \
    --mca btl tcp,self --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24 \
    --mca pml ob1 --mca rmaps_base_oversubscribe 1 "$@"

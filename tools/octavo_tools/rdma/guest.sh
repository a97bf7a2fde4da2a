#!/bin/bash
# Inside the guest: soft-RoCE over an interface without a cable, then verbs by themselves, the doctor, and blocks by each library over RDMA.
# Every command must succeed; what it is to say is looked at where a command could succeed without RDMA.
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run
ulimit -l unlimited
cd "$OCTAVO_ROOT"

step() { printf '\n== %s (%s s)\n' "$1" "$(cut -d. -f1 /proc/uptime)"; }
packets() { cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts; }

step "kernel $(uname -r), rxe0 over fabric0"
ip link set lo up
ip link add fabric0 type dummy
ip addr add 10.77.0.1/24 dev fabric0
ip link set fabric0 mtu 4200 up
rdma link add rxe0 type rxe netdev fabric0
rdma link

step "ibv_rc_pingpong over RoCE v2"
ibv_rc_pingpong -d rxe0 -g 1 -s 65536 -n 200 >/run/pong 2>&1 &
sleep 1
ibv_rc_pingpong -d rxe0 -g 1 -s 65536 -n 200 10.77.0.1 | tail -2
wait

step "NIXL's libibverbs knows no such device: the system's in its place, in this guest alone"
system=$(ldconfig -p | awk '/libibverbs\.so\.1 /{print $NF; exit}')
vendored=$("$OCTAVO_PYTHON" -c "
import glob, importlib.util, os
(folder,) = importlib.util.find_spec('nixl_cu12').submodule_search_locations
print(*glob.glob(os.path.join(os.path.dirname(folder), 'nixl_cu12.libs', 'libibverbs*')))")
for file in $vendored; do ln -sfv "$system" "$file"; done

export UCX_TLS=rc_verbs,ud_verbs,self UCX_NET_DEVICES=rxe0:1 UCX_IB_GID_INDEX=1 MC_GID_INDEX=1
step "octavo doctor --fabric"
"$(dirname "$OCTAVO_PYTHON")/octavo" doctor --fabric

blocks() {
    step "blocks by $1"
    local before moved
    before=$(packets)
    "$OCTAVO_PYTHON" tools/octavo_tools/rdma/blocks.py "$1" 10.77.0.1 "$2"
    moved=$(($(packets) - before))
    echo "$moved packets by rxe0"
    [ "$moved" -ge 9 ] # one for each block that was asked for
}
blocks ucx "ucx over $UCX_TLS"
blocks mooncake "mooncake over rdma (rxe0)"
step done

#!/bin/sh
# Run a command where nothing can listen outside loopback and nothing that it starts outlives it:
# in network and process namespaces of its own, when the kernel allows them, else as it is. Ray
# binds every interface and leaves raylets behind otherwise. Within another isolated.sh the network
# is the outer one's. Signals go to the process group: unshare itself heeds SIGKILL only.
set -eu
first_process="$(dirname "$0")/first_process.py"
network=n
raise_loopback="ip link set lo up"
[ -z "${WITHIN_ISOLATED:-}" ] || { network= raise_loopback=true; }
if unshare -r${network}pf --mount-proc true 2>/dev/null; then
    export WITHIN_ISOLATED=1
    exec unshare -r${network}pf --mount-proc --kill-child \
        sh -c "$raise_loopback && exec python3 \"\$0\" \"\$@\"" "$first_process" "$@"
fi
echo "isolated.sh: no namespaces here, Ray will bind every interface" >&2
exec "$@"

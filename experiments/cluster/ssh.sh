#!/bin/bash
# Train on several nodes with nothing but ssh: start a launcher on each, end all when one fails.
#
#   experiments/cluster/ssh.sh HOSTS SLOTS SCRIPT [ARGUMENT ...]
#
#   HOSTS   a file with a host a line, the head node first; `#` begins a comment
#   SLOTS   processes a node
#   SCRIPT  what every process runs, or -m MODULE; it, the working directory and the interpreter
#           have the same paths on every node
#
# ssh must log in without a password. The launchers end with this script, however it ends.
# Started again, perhaps with fewer hosts, a run with resume="auto" continues.
#
# Settings, from the environment:
#   PORT          of the head node, free and reachable from the others; 29500
#   MAX_RESTARTS  how often torchrun starts the processes again after a failure; 3
#   PYTHON        the interpreter; the first on the PATH here
#   SSH           ssh and its options
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, OMP_NUM_THREADS   every node gets them
set -euo pipefail

if (($# < 3)); then
    echo "usage: ssh.sh HOSTS SLOTS SCRIPT [ARGUMENT ...]" >&2
    exit 2
fi
hosts_file=$1 slots=$2
shift 2

read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=15}"
python=${PYTHON:-$(command -v python3)}
mapfile -t hosts < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' "$hosts_file")
if ((${#hosts[@]} == 0)); then
    echo "ssh.sh: $hosts_file names no host" >&2
    exit 2
fi

settings=()
for name in GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME OMP_NUM_THREADS; do
    if [[ -n ${!name:-} ]]; then settings+=("$name=${!name}"); fi
done

# On a node: torchrun, which is ended when the input closes, as it does with this script. One
# line, because not every login shell takes a line break in an argument.
remote='cd "$1" || exit; shift; exec 3<&0; "$@" 3<&- </dev/null & launcher=$!;'
remote+=' { read -r _ <&3; kill -TERM "$launcher"; } >/dev/null 2>&1 & watch=$!;'
remote+=' code=0; wait "$launcher" || code=$?; kill "$watch" 2>/dev/null; exit "$code"'

# The script alone holds the writing end of this pipe; every ssh reads from it, and only its end.
folder=$(mktemp -d)
mkfifo "$folder/alive"
exec 9<>"$folder/alive"
end() {
    exec 9>&-
    wait
    rm -rf "$folder"
}
trap end EXIT
trap 'exit 130' INT TERM HUP

for node in "${!hosts[@]}"; do
    command=(env "${settings[@]}" "$python" -m torch.distributed.run
        --nnodes="${#hosts[@]}" --node-rank="$node" --nproc-per-node="$slots"
        --master-addr="${hosts[0]#*@}" --master-port="${PORT:-29500}"
        --max-restarts="${MAX_RESTARTS:-3}" "$@")
    # ssh joins its arguments to one line, which the login shell splits again.
    line=$(printf '%q ' bash -c "$remote" node "$PWD" "${command[@]}")
    "${ssh[@]}" "${hosts[node]}" "$line" <"$folder/alive" 9>&- &
done

for _ in "${hosts[@]}"; do
    code=0
    wait -n || code=$?
    if ((code != 0)); then
        echo "ssh.sh: a launcher ended with status $code; the others are ended" >&2
        exit "$code"
    fi
done

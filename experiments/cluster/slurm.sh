#!/bin/bash
# Train on several nodes with Slurm: one launcher a node, one process a GPU.
#
#   sbatch --nodes=4 experiments/cluster/slurm.sh SCRIPT [ARGUMENT ...]
#
# SCRIPT is a path, or -m MODULE.
# Submitted again with the same folder, on any number of nodes, a run with resume="auto" continues.
# It does so by itself after a preemption, a lost node or the time limit, which requeue the job.
#
#SBATCH --job-name=pipetransformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@90
#
# Settings, as sbatch --export=ALL,SLOTS=4:
#   SLOTS         processes a node; its GPUs, or 1 where there are none
#   MAX_RESTARTS  how often torchrun starts the processes again after a failure; 3
#   PYTHON        the interpreter, at the same path on every node; the first on the PATH
set -euo pipefail

if (($# == 0)); then
    echo "usage: sbatch [--nodes=N] slurm.sh SCRIPT [ARGUMENT ...]" >&2
    exit 2
fi

cpus=${SLURM_CPUS_PER_TASK:-1}
export SLOTS=${SLOTS:-${SLURM_GPUS_ON_NODE:-1}}
export MAX_RESTARTS=${MAX_RESTARTS:-3}
export PYTHON=${PYTHON:-$(command -v python3)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > SLOTS ? cpus / SLOTS : 1))}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes[0]}
# Two jobs that share a node must not meet at one port.
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# Steps since the last checkpoint are lost, and done again after the requeue.
out_of_time() {
    echo "slurm.sh: the time limit is near, the job is requeued" >&2
    scontrol requeue "$SLURM_JOB_ID"
}
trap out_of_time USR1

# Slurm's variables of a node are known on that node only, so a shell there reads them.
launch='exec "$PYTHON" -m torch.distributed.run --nnodes="$SLURM_NNODES" \
    --node-rank="$SLURM_NODEID" --nproc-per-node="$SLOTS" --master-addr="$MASTER_ADDR" \
    --master-port="$MASTER_PORT" --max-restarts="$MAX_RESTARTS" "$@"'
srun --kill-on-bad-exit=1 --cpus-per-task="$cpus" bash -c "$launch" launch "$@" &
srun_id=$!

# A signal ends `wait` before srun has ended.
while code=0; wait "$srun_id" || code=$?; kill -0 "$srun_id" 2>/dev/null; do :; done
exit "$code"

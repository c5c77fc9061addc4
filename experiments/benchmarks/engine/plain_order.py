"""Keep a baseline: a pipeline whose backward is left to autograd."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LONGEST_WAIT_S = 120.0

Hidden = tuple[Tensor, ...]


class PlainOrder(nn.Module):
    """Run forwards by clock cycles, each partition in a thread, over one autograd graph.

        clock        0     1     2     3        M = 3 micro-batches, K = 2 partitions
        partition 0  F0    F1    F2    ..
        partition 1  ..    F0    F1    F2

    The one graph holds all micro-batches. Nothing says in which order its backward runs them, and
    on the CPU it runs in the caller's thread alone.

    Args:
        module: its layers pass skips along in tuples, if there are any.
        balance: layers of each partition.
        chunks: micro-batches of a mini-batch.
        num_checkpointed: of the micro-batches, from the first on.
    Source: the baseline of torchgpipe (Kim et al. 2020), section 4.1.
    """

    def __init__(
        self, module: nn.Sequential, balance: Sequence[int], *, chunks: int, num_checkpointed: int
    ) -> None:
        super().__init__()
        ends = [sum(balance[: j + 1]) for j in range(len(balance))]
        starts = [0, *ends[:-1]]
        self.partitions = nn.ModuleList(
            module[start:end] for start, end in zip(starts, ends, strict=True)
        )
        self.chunks, self.num_checkpointed = chunks, num_checkpointed

    def forward(self, input: Tensor) -> Tensor:
        """Return the gathered output."""
        # A reentrant checkpoint wants an input that needs a gradient.
        pieces = input.chunk(self.chunks)
        flow: list[Hidden] = [(piece.detach().requires_grad_(),) for piece in pieces]
        num_stages, num_micro_batches = len(self.partitions), len(flow)
        with ThreadPoolExecutor(
            num_stages, initializer=partial(torch.set_num_threads, 1)
        ) as threads:
            for clock in range(num_micro_batches + num_stages - 1):
                tasks = {
                    clock - stage: threads.submit(self._run, stage, clock - stage, flow)
                    for stage in range(num_stages)
                    if 0 <= clock - stage < num_micro_batches
                }
                for micro_batch, task in tasks.items():
                    flow[micro_batch] = task.result(LONGEST_WAIT_S)
        return torch.cat([output for (output,) in flow])

    def _run(self, stage: int, micro_batch: int, flow: Sequence[Hidden]) -> Hidden:
        run = partial(run_partition, self.partitions[stage])
        if micro_batch >= self.num_checkpointed:
            return run(*flow[micro_batch])
        found = checkpoint(run, *flow[micro_batch], use_reentrant=True, preserve_rng_state=False)
        assert isinstance(found, tuple)
        return found


def run_partition(partition: nn.Module, *hidden: Tensor) -> Hidden:
    """Run a partition, which takes and returns a tensor by itself or a tuple."""
    output = partition(hidden if len(hidden) > 1 else hidden[0])
    return output if isinstance(output, tuple) else (output,)

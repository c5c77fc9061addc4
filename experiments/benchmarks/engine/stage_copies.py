"""Train independent copies of a pipeline's stage: what the machine itself gains by more cores."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MICRO_BATCHES_A_RUN = 3
LONGEST_WAIT_S = 120.0


@dataclass(frozen=True)
class StageCopy:
    """Hold a copy of a stage's layers, and a micro-batch of what enters it."""

    layers: nn.Module
    hidden: Tensor

    @staticmethod
    def of(layers: nn.Module, hidden: Tensor) -> StageCopy:
        """Copy both, as no copy shall share memory with another."""
        return StageCopy(copy.deepcopy(layers), hidden.clone().requires_grad_())

    def run(self) -> None:
        """Run forward and backward of some micro-batches."""
        for _ in range(MICRO_BATCHES_A_RUN):
            output = self.layers(self.hidden)
            output.backward(torch.ones_like(output))


def run_in_threads(copies: list[StageCopy]) -> None:
    """Run copies at the same time, each in a thread of its own with one intra-op thread.

    Raises:
        RuntimeError: one failed, or took too long.
    """
    finished: list[StageCopy] = []

    def work(stage: StageCopy) -> None:
        torch.set_num_threads(1)
        stage.run()
        finished.append(stage)

    threads = [threading.Thread(target=work, args=(stage,), daemon=True) for stage in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_WAIT_S)
    if len(finished) < len(copies):
        raise RuntimeError(
            f"{len(copies) - len(finished)} of {len(copies)} copies of a stage failed or took "
            f"longer than {LONGEST_WAIT_S:g} s"
        )

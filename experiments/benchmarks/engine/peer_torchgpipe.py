"""Train with torchgpipe, the peer on thread links; needs the extra `bench`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchgpipe import GPipe
from torchgpipe.skip import Namespace, pop, skippable, stash

from experiments.benchmarks.engine.workloads import (
    Contestant,
    EngineModel,
    MiniBatch,
    UNet,
    through_autograd,
)
from experiments.benchmarks.gpipe.unet import NUM_LEVELS, layers_of


class StashLatent(nn.Module):
    """Keep the latent for the level's other end."""

    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        """Return the (B, C, H, W) input unchanged."""
        yield stash("skip", input)
        return input


class JoinSkip(nn.Module):
    """Concatenate the level's skip."""

    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        """Return (B, C + skip's C, H, W)."""
        skip = yield pop("skip")
        return torch.cat((input, skip), dim=1)


Stash = skippable(stash=["skip"])(StashLatent)
Join = skippable(pop=["skip"])(JoinSkip)


def build(workload: EngineModel) -> nn.Sequential:
    """Build the workload's model with torchgpipe's skip connections, with the same weights."""
    if not isinstance(workload, UNet):
        return workload.build()
    torch.manual_seed(0)
    namespaces = [Namespace() for _ in range(NUM_LEVELS)]
    return nn.Sequential(
        *layers_of(
            workload.num_blocks,
            workload.num_channels,
            0.0,
            stash_at=lambda level: Stash().isolate(namespaces[level]),
            join_at=lambda level: Join().isolate(namespaces[level]),
        )
    )


def contestant(
    workload: EngineModel,
    balance: Sequence[int],
    batch: MiniBatch,
    *,
    chunks: int,
    checkpoint: str,
) -> Contestant:
    """Train the workload's model with torchgpipe on CPU partitions."""
    module = GPipe(
        build(workload),
        list(balance),
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint=checkpoint,
    )
    return through_autograd(module, batch)

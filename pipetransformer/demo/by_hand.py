"""Freeze as the elastic run does, but without the Trainer: what a user could write instead.

plain    one process that holds the whole model, on all cores; frozen layers' outputs are kept
torch    torch.distributed.pipelining, half of the blocks in each of two processes

Both freeze the same layers at the same steps, and take the same samples at the same rates.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.demo.digits import fine_tuned, load_digits_split
from pipetransformer.demo.held_up import HeldUp
from pipetransformer.demo.results import Result
from pipetransformer.demo.settings import (
    BATCH_SIZE,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MICRO_BATCHES,
    NUM_BLOCKS,
    NUM_PATCHES,
    NUM_SLOTS,
    DemoSettings,
    batches_of,
    num_frozen_in,
    rate_factor,
)
from pipetransformer.model import adamw
from pipetransformer.processes import World, connect

_TIMEOUT_S = 300.0


class Blocks(nn.Module):
    """Run some of a ViT's blocks: with the embedding before the first, the head behind the last.

    Args:
        model: the ViT; its weights are shared.
        first, end: blocks first..end-1.
    """

    def __init__(self, model: Any, first: int, end: int) -> None:
        super().__init__()
        self.first = first
        self.blocks = model.blocks[first:end]
        self.embedding = model.patch_embed if first == 0 else None
        self.positions = model.pos_embed if first == 0 else None
        self.head: nn.Module | None = None
        if end == len(model.blocks):
            self.norms, self.head = nn.ModuleList([model.norm, model.fc_norm]), model.head

    def forward(self, x: Tensor) -> Tensor:
        return self.above(0, self.below(0, x))

    def below(self, num_frozen: int, x: Tensor) -> Tensor:
        """Run what is frozen where so many of all blocks are."""
        if self.embedding is not None:
            x = self.embedding(x) + self.positions
        return self.blocks[: self._own(num_frozen)](x) if num_frozen else x

    def above(self, num_frozen: int, x: Tensor) -> Tensor:
        """Run the rest."""
        x = self.blocks[self._own(num_frozen) :](x)
        if self.head is None:
            return x.contiguous()  # torch sends no other.
        norm, head_norm = self.norms
        logits: Tensor = self.head(head_norm(norm(x).mean(dim=1)))
        return logits

    def freeze(self, num_frozen: int) -> None:
        """Leave the weights of the bottom blocks as they are; of 0, none."""
        if num_frozen and self.embedding is not None and self.positions is not None:
            self.embedding.requires_grad_(False)
            self.positions.requires_grad_(False)
        self.blocks[: self._own(num_frozen)].requires_grad_(False)

    def _own(self, num_frozen: int) -> int:
        return max(0, min(num_frozen - self.first, len(self.blocks)))


class PlainLoop:
    """Train all blocks in this process, and keep what the frozen ones gave for each sample.

    Args:
        model: of NUM_BLOCKS blocks.
        images, labels: (N, 1, 32, 32) float32 and (N,) int64, that train.
    """

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.blocks = Blocks(model, 0, NUM_BLOCKS)
        self._images, self._labels = images, labels
        self._kept, self._num_frozen = images, 0

    def freeze(self, num_frozen: int) -> None:
        """Freeze so many bottom blocks, and run all samples through them once."""
        if num_frozen == self._num_frozen:
            return
        self.blocks.freeze(num_frozen)
        with torch.no_grad():
            rows = [self.blocks.below(num_frozen, part) for part in self._images.split(BATCH_SIZE)]
        self._kept, self._num_frozen = torch.cat(rows), num_frozen

    def set_gradients(self, ids: list[int]) -> None:
        """Set the clipped gradients of a batch."""
        rows = self._kept[ids]
        if not self._num_frozen:
            rows = self.blocks.below(0, rows)
        output = self.blocks.above(self._num_frozen, rows)
        nn.functional.cross_entropy(output, self._labels[ids]).backward()
        nn.utils.clip_grad_norm_(self.blocks.parameters(), MAX_GRAD_NORM)

    def num_right(self, images: Tensor, labels: Tensor) -> int:
        """Return how many of the images are taken for what they are."""
        with torch.no_grad():
            return int((self.blocks(images).argmax(dim=1) == labels).sum())


class TorchPipeline:
    """Train half of the blocks in this process; both processes call the same methods.

    Args:
        world: of two processes.
        model: of NUM_BLOCKS blocks, of which this process trains its own.
        images, labels: as of PlainLoop.
    """

    def __init__(self, world: World, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        # It imports torch's compiler, which takes seconds, and other commands do not need it.
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        half = NUM_BLOCKS // NUM_SLOTS
        self.blocks = Blocks(model, world.rank * half, (world.rank + 1) * half)
        self._images, self._labels, self._is_first = images, labels, world.rank == 0
        stage = PipelineStage(self.blocks, world.rank, world.size, torch.device("cpu"))
        # A loss that is divided already: torch's scaling would pass over all gradients again.
        self._schedule = ScheduleGPipe(
            stage, MICRO_BATCHES, loss_fn=_share_of_loss, scale_grads=False
        )

    def freeze(self, num_frozen: int) -> None:
        """Freeze so many bottom blocks, of this process's those among them."""
        self.blocks.freeze(num_frozen)

    def set_gradients(self, ids: list[int]) -> None:
        """Set the clipped gradients of a batch."""
        if self._is_first:
            self._schedule.step(self._images[ids])
        else:
            self._schedule.step(target=self._labels[ids])
        gradients = [p.grad for p in self.blocks.parameters() if p.grad is not None]
        square = torch.zeros(())
        for gradient in gradients:
            square += gradient.square().sum()
        dist.all_reduce(square)  # The norm of both halves, as one model's.
        factor = (MAX_GRAD_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)

    def num_right(self, images: Tensor, labels: Tensor) -> int:
        """Return how many of the images are taken for what they are; 0 on the first process."""
        with torch.no_grad():
            if self._is_first:
                dist.send(self.blocks(images), dst=1)
                return 0
            width = self.blocks.blocks[0].norm1.normalized_shape[0]
            rows = torch.empty(len(images), NUM_PATCHES, width)
            dist.recv(rows, src=0)
            return int((self.blocks(rows).argmax(dim=1) == labels).sum())


def _share_of_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target) / MICRO_BATCHES


def train_by_hand(settings: DemoSettings, run: str) -> None:
    """Train as "plain" or "torch", and write what it came to."""
    world = connect("cpu", timeout_s=_TIMEOUT_S)
    try:
        train, test = load_digits_split()
        model = fine_tuned(settings)
        loop: PlainLoop | TorchPipeline
        if run == "torch":
            loop = TorchPipeline(world, model, *train.tensors)
        else:
            loop = PlainLoop(model, *train.tensors)
        with HeldUp() as held_up:
            seconds = _train(loop, settings, len(train))
        right = torch.tensor(loop.num_right(*test.tensors))
        if world.size > 1:
            dist.all_reduce(right)
        if world.is_main:
            accuracy = right.item() / len(test)
            Result(seconds, accuracy, held_up.share).write(settings.folder_of(run))
    finally:
        world.close()


def _train(loop: PlainLoop | TorchPipeline, settings: DemoSettings, num_samples: int) -> float:
    """Return the seconds of all steps."""
    named = list(loop.blocks.named_parameters())
    optimizer, batches = adamw(LEARNING_RATE)(named), batches_of(num_samples, settings.seed)
    step, max_steps = 0, settings.epochs * len(batches(0))
    start = time.perf_counter()
    for epoch in range(settings.epochs):
        loop.freeze(num_frozen_in(epoch))
        for ids in batches(epoch):
            optimizer.zero_grad(set_to_none=True)
            loop.set_gradients(ids)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * rate_factor(step, max_steps)
            optimizer.step()
            step += 1
    return time.perf_counter() - start

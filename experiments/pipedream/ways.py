"""Train one network in every way, on CPU threads with one intra-op thread each."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from autopipe import GPipe, StashedPipeline
from autopipe.balance import balance_by_time, layer_seconds
from autopipe.pipedream import Machines, ReplicatedPlan, optimize
from autopipe.threads import run_together
from experiments.pipedream.cuts import cut_states
from experiments.pipedream.layer_graph import LayerGraph, LayerNode

Batches = Sequence[tuple[Tensor, Tensor]]
CHOICE = "optimizer's choice"
MEMORY_BYTES_PER_S = 5e9
"""Between threads of one machine: what summing gradients in its memory takes, about."""


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return nn.functional.cross_entropy(output, target)


@dataclass(frozen=True)
class Setting:
    """Say how all ways train.

    Args:
        workers: threads, a stage or a replica each.
        num_micro_batches: of a batch, where batches are cut.
        learning_rate: of AdamW.
    """

    workers: int
    num_micro_batches: int
    learning_rate: float

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Build the optimizer."""
        return torch.optim.AdamW(parameters, lr=self.learning_rate)


class Way(ABC):
    """Train a network, and say what it holds.

    Attributes:
        network: what is trained, whole.
    """

    network: nn.Module

    @abstractmethod
    def train_on(self, batches: Batches) -> None:
        """Train on an epoch."""

    @property
    def weight_versions(self) -> int:
        """Return the most copies of its weights that a worker holds, the present one included."""
        return 1


class Replicas(Way):
    """Share each batch between threads that use one set of weights, and sum their gradients."""

    def __init__(self, network: nn.Sequential, setting: Setting) -> None:
        self.network, self._workers = network, setting.workers
        self._parameters = list(network.parameters())
        self._optimizer = setting.optimizer(self._parameters)

    def train_on(self, batches: Batches) -> None:
        for x, y in batches:
            shares = list(zip(x.chunk(self._workers), y.chunk(self._workers), strict=True))
            found: list[tuple[Tensor, ...]] = [()] * len(shares)

            run_together(
                [
                    partial(self._compute, *share, len(x), found, n)
                    for n, share in enumerate(shares)
                ],
                num_threads=1,
                stop=lambda: None,
                order=lambda number: number,
            )
            for parameter, *gradients in zip(self._parameters, *found, strict=True):
                parameter.grad = sum(gradients[1:], start=gradients[0])
            self._optimizer.step()

    def _compute(
        self, x: Tensor, y: Tensor, size: int, found: list[tuple[Tensor, ...]], number: int
    ) -> None:
        loss = loss_fn(self.network(x), y) * (len(x) / size)
        found[number] = torch.autograd.grad(loss, self._parameters)


class Flushed(Way):
    """Run a pipeline that is empty behind each batch."""

    def __init__(
        self,
        network: nn.Sequential,
        setting: Setting,
        balance: Sequence[int],
        *,
        schedule: str,
        chunks: int,
    ) -> None:
        self.network = self._pipeline = GPipe(
            network,
            balance,
            devices=["cpu"] * len(balance),
            chunks=chunks,
            checkpoint="never",
            schedule=schedule,
        )
        self._optimizer = setting.optimizer(self._pipeline.parameters())

    def train_on(self, batches: Batches) -> None:
        for x, y in batches:
            self._pipeline.step(x, y, loss_fn)
            self._optimizer.step()
            self._optimizer.zero_grad()


class Unflushed(Way):
    """Run a pipeline whose weights go on while batches are in flight."""

    def __init__(
        self,
        network: nn.Sequential,
        setting: Setting,
        balance: Sequence[int],
        *,
        versions: str,
        chunks: int,
    ) -> None:
        self.network = self._pipeline = StashedPipeline(
            network,
            balance,
            optimizer=setting.optimizer,
            devices=["cpu"] * len(balance),
            chunks=chunks,
            versions=versions,
        )

    def train_on(self, batches: Batches) -> None:
        self._pipeline.train_on(batches, loss_fn)

    @property
    def weight_versions(self) -> int:
        return max(self._pipeline.peak_versions, default=1)


def layer_graph(network: nn.Sequential, batch: Tensor) -> LayerGraph:
    """Measure a chain's layers; of forward and backward together a third is the forward's."""
    # The first pass chooses algorithms.
    passes = [layer_seconds(network, batch, timeout_s=0.0) for _ in range(4)][1:]
    usual_s = [statistics.median(times) for times in zip(*passes, strict=True)]
    nodes, hidden = [], batch
    with torch.no_grad():
        for number, (layer, each_s) in enumerate(zip(network, usual_s, strict=True)):
            hidden = layer(hidden)
            size = sum(parameter.nbytes for parameter in layer.parameters())
            nodes.append(
                LayerNode(
                    f"node{number}",
                    type(layer).__name__,
                    each_s / 3,
                    each_s * 2 / 3,
                    (float(hidden.nbytes),),
                    float(size),
                )
            )
    return LayerGraph(tuple(nodes), tuple(pairwise(node.name for node in nodes)))


def choose(graph: LayerGraph, workers: int) -> ReplicatedPlan:
    """Return what PipeDream's optimizer chooses for the threads of this machine."""
    machines = [Machines(workers, MEMORY_BYTES_PER_S)]
    return optimize(cut_states(graph), machines, activations=True)


def ways(build: Callable[[], nn.Sequential], setting: Setting, batch: Tensor) -> dict[str, Way]:
    """Return each way, by its name.

    Args:
        build: the network, with the same weights each time.
        setting: of all.
        batch: (N, 1, 32, 32), to measure layers with.
    """
    balance = balance_by_time(setting.workers, build(), batch)
    flushed, unflushed = partial(Flushed, balance=balance), partial(Unflushed, balance=balance)
    chunks = setting.num_micro_batches
    found: dict[str, Callable[..., Way]] = {
        "data parallel": Replicas,
        "model parallel": partial(flushed, schedule="gpipe", chunks=1),
        "GPipe": partial(flushed, schedule="gpipe", chunks=chunks),
        "1F1B": partial(flushed, schedule="1f1b", chunks=chunks),
        "async 1F1B": partial(unflushed, versions="stashed", chunks=1),
        "async 1F1B, vertical sync": partial(unflushed, versions="vertical_sync", chunks=1),
        "async 1F1B, 2BW": partial(unflushed, versions="double_buffered", chunks=chunks),
    }
    plan = choose(layer_graph(build(), batch), setting.workers)
    if plan.name == "data parallel":
        found[CHOICE] = Replicas
    elif plan.name == "straight":
        own = [leaf.end - leaf.begin for leaf in plan.leaves]
        found[CHOICE] = partial(Unflushed, balance=own, versions="stashed", chunks=1)
    else:
        print(f"{CHOICE}: {plan.name}, which is planned and not trained here")
    return {name: make(build(), setting) for name, make in found.items()}

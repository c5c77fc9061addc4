"""Update a stage's weights while micro-batches in flight still use earlier versions of them.

Version v of a stage's weights is their value after v updates. Legend: K stages, the first is
s = 0; M micro-batches a batch; micro-batch i belongs to batch i // M; w(s) = K - 1 - s forwards
run ahead of a backward in 1F1B. Each batch t updates once, by the mean of its gradients. A
micro-batch's forward and backward both use the version below (update formulas for M = 1):

    "stashed"          the newest: max(0, i - w(s)) // M
                       w(t+1) = w(t) - nu grad f(w_0(t-K+1), ..., w_K-1(t))
    "vertical_sync"    what stage 0 used: max(0, i - (K - 1)) // M
                       w(t+1) = w(t) - nu grad f(w(t-K+1), ..., w(t-K+1))
    "double_buffered"  the one before the batch's: max(0, i // M - 1), with M >= K - 1
                       w(t+1) = w(t) - nu grad f(w(t-1))

With K = 1 all three are ordinary training.

Stages may have several workers: n(s) on stage s, b(s) on the stages below s, N on all. Worker
i % n(s) runs micro-batch i, and (N - 1 - b(s)) // n(s) of its own forwards ahead, so that

    w(s) = n(s) * ((N - 1 - b(s)) // n(s))      and w(0) replaces K - 1

Source: PipeDream (Narayanan et al. 2019), section 3.3; PipeDream-2BW (2021), section 3.1. There a
stage of n workers updates every n micro-batches, at its own pace; ours updates once a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from torch import Tensor, nn

from autopipe.engine import Gradients, Payload, StageWork, Starts
from autopipe.schedule import StageWorkers

__all__ = ["StagePlace", "StashedWork", "WeightVersions", "check_versions"]

_T = TypeVar("_T")
Weights = Mapping[str, Tensor]
"""Leaves by the names of the parameters that they stand for."""


class WeightVersions:
    """Hold the versions of some modules' trained parameters; version 0 is their present value.

    A version is a set of leaves. The newest shares the parameters' memory. At an update the
    parameters move to new memory, if the old version is still needed. Buffers have no versions:
    running statistics are those of the newest forward, as published.

    Args:
        modules: all modules that hold the parameters as attributes.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
        trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
        self.parameters: dict[str, nn.Parameter] = {}
        # Where forwards find a parameter: a module's own dictionary, the key there, and the name
        # here. A shared parameter has several places.
        self._slots: list[tuple[dict[str, Any], str, str]] = []
        names: dict[int, str] = {}
        for number, module in enumerate(modules):
            for prefix, part in module.named_modules(prefix=str(number)):
                for key, parameter in part._parameters.items():
                    if parameter is not None and id(parameter) in trained:
                        name = names.setdefault(id(parameter), f"{prefix}.{key}")
                        self.parameters[name] = parameter
                        self._slots.append((part._parameters, key, name))
        self.newest = 0
        self._kept = {0: self._leaves()}

    def __getitem__(self, version: int) -> Weights:
        return self._kept[version]

    def run_with(self, weights: Weights, call: Callable[[], _T]) -> _T:
        """Call a function that runs the modules, with these weights in the parameters' places."""
        try:
            for place, key, name in self._slots:
                place[key] = weights[name]
            return call()
        finally:
            for place, key, name in self._slots:
                place[key] = self.parameters[name]

    def update(
        self, change: Callable[[], None], *, oldest: int, in_use: Iterable[Weights]
    ) -> None:
        """Make a new version by a change in place, and drop the gradients.

        Versions from `oldest` on will still be asked for; graphs need those `in_use`.
        """
        present = self._kept[self.newest]
        if oldest <= self.newest or any(weights is present for weights in in_use):
            for parameter in self.parameters.values():
                # The old memory stays with the old version's leaves.
                parameter.data = parameter.data.clone()
        change()
        for parameter in self.parameters.values():
            parameter.grad = None
        self.newest += 1
        self._kept = {v: own for v, own in self._kept.items() if v >= oldest}
        self._kept[self.newest] = self._leaves()

    def count_with(self, in_use: Iterable[Weights]) -> int:
        """Count the versions in memory."""
        return len({id(weights) for weights in (*self._kept.values(), *in_use)})

    def _leaves(self) -> Weights:
        # `data`, not `detach()`: a detached leaf shares the version counter, so that autograd
        # would take the next update for an in-place change of the leaf.
        return {name: p.data.requires_grad_() for name, p in self.parameters.items()}


@dataclass(frozen=True)
class StagePlace:
    """State a stage's place among K, and a batch's M; `workers` of each stage, () for one each."""

    stage: int
    num_stages: int
    num_micro_batches: int
    workers: tuple[int, ...] = ()

    def batch_of(self, micro_batch: int) -> int:
        return micro_batch // self.num_micro_batches

    @cached_property
    def warm_up(self) -> int:
        """Return how many micro-batches this stage's forwards are ahead of its backwards: w(s)."""
        return self._warm_up_of(self.stage)

    @cached_property
    def longest_warm_up(self) -> int:
        """Return the first stage's warm-up: w(0)."""
        return self._warm_up_of(0)

    def _warm_up_of(self, stage: int) -> int:
        workers = StageWorkers(self.workers or (1,) * self.num_stages)
        return workers.replicas[stage] * workers.warm_up(stage)


VERSION_RULES: dict[str, Callable[[StagePlace, int], int]] = {
    "stashed": lambda place, i: place.batch_of(max(0, i - place.warm_up)),
    "vertical_sync": lambda place, i: place.batch_of(max(0, i - place.longest_warm_up)),
    "double_buffered": lambda place, i: max(0, place.batch_of(i) - (place.num_stages > 1)),
}


def check_versions(name: str, place: StagePlace) -> None:
    """Raise a ValueError for an unknown name, or one that needs more micro-batches a batch."""
    if name not in VERSION_RULES:
        raise ValueError(f"versions are {name!r}; choose one of {', '.join(VERSION_RULES)}")
    least, num = place.longest_warm_up, place.num_micro_batches
    if name == "double_buffered" and num < least:
        raise ValueError(
            f"double_buffered keeps two versions, which takes at least {least} micro-batches a "
            f"batch on {place.num_stages} stages; there are {num}"
        )


class StashedWork(StageWork):
    """Do a stage's work on a stream of batches, with an update after each.

    The parameters' `grad` is the sum over a batch's micro-batches in their order, whichever
    versions they used.

    Args:
        modules: all modules that hold the parameters as attributes: the stage's own, and a model
            whose methods they call.
        parameters: those that it updates; others have no versions.
        versions: a name of `VERSION_RULES`.
        update: given a batch's number, changes the parameters in place by their `grad`.
    Attributes:
        peak_versions: most versions of the weights that were held at once.
    """

    def __init__(
        self,
        work: StageWork,
        modules: Iterable[nn.Module],
        parameters: Iterable[nn.Parameter],
        *,
        place: StagePlace,
        versions: str,
        update: Callable[[int], None],
    ) -> None:
        self._work, self._place, self._update = work, place, update
        self._version_of = partial(VERSION_RULES[versions], place)
        self._versions = WeightVersions(modules, parameters)
        self._used: dict[int, Weights] = {}
        self._next_forward = 0
        self.peak_versions = 1

    def first_input(self, micro_batch: int) -> Payload:
        return self._work.first_input(micro_batch)

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        # Versions that this and later forwards use must be kept.
        self._next_forward = micro_batch + 1
        self._used[micro_batch] = weights = self._versions[self._version_of(micro_batch)]
        self._note_peak()
        return self._versions.run_with(weights, partial(self._work.forward, micro_batch, inputs))

    def finish(self, micro_batch: int, outputs: Payload) -> Tensor | None:
        return self._work.finish(micro_batch, outputs)

    def backward(
        self,
        micro_batch: int,
        starts: Starts,
        gradients: Sequence[Tensor] | None,
        anchors: Gradients,
        *,
        retain: bool,
    ) -> Gradients:
        """Back-propagate through the micro-batch's version; gradients go to the parameters."""
        leaves = self._used.pop(micro_batch)
        parameters = self._versions.parameters
        # Lent to the leaves, because autograd adds to the gradient that a leaf has.
        for name, leaf in leaves.items():
            leaf.grad, parameters[name].grad = parameters[name].grad, None
        back = partial(super().backward, micro_batch, starts, gradients, anchors, retain=retain)
        # With the version in place: a layer that checkpoints itself runs forward again here.
        of_inputs = self._versions.run_with(leaves, back)
        for name, leaf in leaves.items():
            if parameters[name].grad is not None:
                raise RuntimeError(
                    f"a layer's forward has used {name!r} past the module that holds it, so that "
                    "its former values cannot be kept; read it from the module's attribute"
                )
            parameters[name].grad, leaf.grad = leaf.grad, None
        return of_inputs

    def update(self, micro_batch: int) -> None:
        # A micro-batch without a backward would stay, and hold its version.
        self._used = {i: leaves for i, leaves in self._used.items() if i > micro_batch}
        self._note_peak()
        self._versions.update(
            partial(self._update, self._place.batch_of(micro_batch)),
            oldest=self._version_of(self._next_forward),
            in_use=self._used.values(),
        )

    def _note_peak(self) -> None:
        held = self._versions.count_with(self._used.values())
        self.peak_versions = max(self.peak_versions, held)

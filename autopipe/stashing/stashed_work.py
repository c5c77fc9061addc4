"""Let a stage's weights go on while micro-batches are in flight that were computed with others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor, nn

from autopipe.engine import Gradients, Payload, StageWork, Starts
from autopipe.stashing.version_rules import VERSION_RULES, StagePlace
from autopipe.stashing.weight_versions import Weights, WeightVersions


class StashedWork(StageWork):
    """Do a stage's work on a stream of batches, with an update behind each.

    A micro-batch's forward and backward use one version of the weights. The gradients of a batch
    are summed into the parameters' `grad` in the order of its micro-batches, whichever versions
    they are of.

    Args:
        modules: all that hold its parameters as attributes: what it runs, and a model whose
            methods that calls.
        parameters: those that it updates; others have no versions.
        versions: a name of `VERSION_RULES`.
        update: given a batch, changes the parameters in place by their `grad`.
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
        """Back-propagate; the parameters get what their version's leaves would."""
        leaves = self._used.pop(micro_batch)
        parameters = self._versions.parameters
        # Autograd adds to what a leaf already has.
        for name, leaf in leaves.items():
            leaf.grad, parameters[name].grad = parameters[name].grad, None
        back = partial(super().backward, micro_batch, starts, gradients, anchors, retain=retain)
        # A layer that checkpoints itself runs forward once more.
        found = self._versions.run_with(leaves, back)
        for name, leaf in leaves.items():
            if parameters[name].grad is not None:
                raise RuntimeError(
                    f"a layer's forward has used {name!r} past the module that holds it, so that "
                    "its former values cannot be kept; read it from the module's attribute"
                )
            parameters[name].grad, leaf.grad = leaf.grad, None
        return found

    def update(self, micro_batch: int) -> None:
        # Not every micro-batch had a backward.
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

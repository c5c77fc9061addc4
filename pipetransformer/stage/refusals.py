"""Refuse to go on training, on all ranks alike, and say what was wrong.

A backward flows from the head down, so a number that is not finite began in the highest sublayer
whose gradient is not, unless the loss itself was not finite. Before both come the samples and, in
a run's first step, the weights that the model came with.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import final

import torch
from torch import Tensor

from autodp import gather_json
from autopipe.loss import SplitProbe
from pipetransformer.errors import NonFiniteError
from pipetransformer.feed import Rows
from pipetransformer.stage.step_result import StepSums
from pipetransformer.stage.wiring import StageWiring
from pipetransformer.stage.work import MicroBatches

_LOGGER = logging.getLogger(__name__)

_SKIPS = "leave steps out with on_nonfinite='skip'"


@dataclass(frozen=True)
class Origin:
    """Say where a number that is not finite began, and what to do about it."""

    where: str
    advice: str = f"Lower the learning rate, clip with max_grad_norm, or {_SKIPS}"


@dataclass(frozen=True)
class Finding:
    """Say what is not finite on a rank.

    Args:
        in_loss: whether its part of the loss.
        highest: the highest sublayer whose gradient, summed over the replicas, or -1.
        brought: whether its own gradient there was so before the sum; None if that is not known.
    """

    in_loss: bool
    highest: int = -1
    brought: bool | None = False


@final
class Refusals:
    """Raise where a step must not be followed by another.

    Args:
        probe: compares losses of the steps.
    """

    def __init__(self, wiring: StageWiring, probe: SplitProbe) -> None:
        self._task, self._world, self._probe = wiring.task, wiring.world, probe
        self._reads = wiring.index == 0  # Stage 0 holds the frozen prefix, too.
        self._held = range(0 if self._reads else wiring.indices.start, wiring.indices.stop)

    def check(self, steps: Sequence[StepSums], wrong: str, *, first_step: int) -> None:
        """Refuse to go on, on all ranks alike.

        Args:
            steps: what all ranks told of one step or several.
            wrong: what this rank found wrong, or "".
        """
        if any(one.split for one in steps):
            self._probe.refuse()
        if any(one.wrong for one in steps):
            raise ValueError(wrong or "another rank refuses to go on; it says why")
        # A later batch may have nothing to learn from.
        if first_step == 0 and not any(one.trained for one in steps):
            raise ValueError(
                f"the loss {self._task.loss_fn.name!r} has no gradient by the model's output, and "
                "nothing would train; do not detach it"
            )

    def nonfinite(self, what: str, step: int, batches: MicroBatches, own: Finding) -> None:
        """Say where a number that is not finite began: raise, or warn on rank 0. Collective.

        Args:
            what: is not finite.
            own: what of it is this rank's.
        """
        before = self._in_weights() if step == 0 else None
        before = before or self._in_samples(batches.ids, batches.rows)
        found = [Finding(**one) for one in gather_json(asdict(own), group=self._world.group)]
        origin = self._first(before) or Origin(self._where(found))
        if self._task.config.on_nonfinite == "raise":
            raise NonFiniteError(f"{what}; {origin.where}. {origin.advice}")
        if self._world.is_main:
            _LOGGER.warning("%s; %s: the step is skipped on all ranks", what, origin.where)

    def cause_in_samples(self, ids: Tensor, rows: Rows) -> str:
        """Say what is not finite in a step's samples, and what to do, or "". Collective."""
        cause = self._first(self._in_samples(ids, rows))
        return f"{cause.where}. {cause.advice}" if cause else ""

    def _first(self, own: Origin | None) -> Origin | None:
        """Return what the lowest rank found that found something. Collective."""
        told = gather_json(own and [own.where, own.advice], group=self._world.group)
        return next((Origin(*one) for one in told if one), None)

    def _in_weights(self) -> Origin | None:
        """Look at this rank's weights, which still are the user's."""
        for index in self._held:
            for name, tensor in self._task.model.tensors(index).items():
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    return Origin(
                        f"it began before the run, in {name!r} of the model as it was given",
                        "Load or initialise it anew",
                    )
        return None

    def _in_samples(self, ids: Tensor, rows: Rows) -> Origin | None:
        """Look once more at the samples that this rank reads."""
        try:
            batch = rows.look(ids) if self._reads and len(ids) else {}
        except Exception as error:  # The step's own error must be told, and not this one.
            _LOGGER.warning("a bad step's samples cannot be read once more to look at: %r", error)
            return None
        for name, entry in batch.items():
            if entry.is_floating_point():
                # An attention mask that is added may hold -inf.
                bad = (entry.isnan() | (entry == torch.inf)).reshape(len(ids), -1).any(1)
                if samples := ids[bad.cpu()].tolist():
                    more = f" and {len(samples) - 1} more of its samples" if samples[1:] else ""
                    return Origin(
                        f"it began in the data: {name!r} of sample {samples[0]}{more} holds "
                        "numbers that are not finite",
                        f"Correct or leave out such samples, or {_SKIPS}",
                    )
        return None

    def _where(self, found: Sequence[Finding]) -> str:
        """Say where it began, by what each rank found."""
        if in_loss := [rank for rank, one in enumerate(found) if one.in_loss]:
            return f"it began before the backward, in the loss of {_name(in_loss)}"
        highest = max(one.highest for one in found)
        if highest < 0:
            return "every single value is finite, but their sum is too large for a number"
        where = f"in the gradient of sublayer {self._task.model.sublayers[highest].name!r}"
        holders = {rank: one.brought for rank, one in enumerate(found) if one.highest == highest}
        if ranks := [rank for rank, brought in holders.items() if brought]:
            return f"it began {where} on {_name(ranks)}"
        if None in holders.values():
            return f"it began {where}, on one of {_name([*holders])}"
        return f"it began {where}, in the sum over the replicas"


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

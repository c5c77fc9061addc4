"""Reckon, before the first step, what rows of frozen parts cost, and what they save of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from pipetransformer.feed import Batch
from pipetransformer.loop.forward import left_alone
from pipetransformer.loop.rows.loop_model import LoopModel
from pipetransformer.loop.rows.row_probe import tensors_in
from pipetransformer.model import whole_in_mode

_NUM_SAMPLES = 8
"""Samples that are read for it; a batch of the usual size is made of them."""
_LEAST_SHARE = 0.1
"""The share of a step that rows must save to be kept unasked."""
_MOST_REPEATS, _ENOUGH_S = 12, 0.3

FromRows = Callable[[Batch, Tensor, Mapping[str, Tensor]], Any]


@final
@dataclass(frozen=True)
class RowAccount:
    """Say what rows cost and save. Times are of a forward and a backward of one batch.

    Args:
        name: of the parts.
        num_together: samples of a batch.
        whole_s: seconds from the start; None where that is not known, as of a teacher.
        short_s: seconds from rows.
        fill_s: seconds to compute rows of a batch.
    """

    name: str
    num_together: int
    whole_s: float | None
    short_s: float
    fill_s: float

    @property
    def saved_share(self) -> float:
        """Return which share of a step rows save; 1 where that is not known."""
        return 1.0 if self.whole_s is None else 1 - self.short_s / self.whole_s

    @property
    def pays(self) -> bool:
        return self.saved_share >= _LEAST_SHARE

    @property
    def first_gain(self) -> int:
        """Return the number of the epoch, from 1, behind which rows have saved time in all."""
        assert self.whole_s is not None
        saved = self.whole_s - self.short_s
        return 1 + max(1, math.ceil((self.fill_s + self.short_s - self.whole_s) / saved))

    def __str__(self) -> str:
        text = f"rows of {self.name}"
        if self.whole_s is None:
            return text
        text += (
            f": forward and backward of {self.num_together} samples take "
            f"{1e3 * self.whole_s:.1f} ms, from rows {1e3 * self.short_s:.1f} ms"
        )
        if not self.pays:
            return text
        share = f"{100 * self.saved_share:.0f} %"
        return f"{text}; this saves {share} of an epoch, and pays from epoch {self.first_gain} on"


def row_account(known: LoopModel, from_rows: FromRows) -> RowAccount:
    """Run a usual batch with rows and without. A model is left as it was.

    Args:
        from_rows: runs the model on inputs, rows, and targets.
    """
    model, task, samples = known.task.model.model, known.task, known.samples
    device = next(model.parameters()).device
    num = task.config.global_batch_size
    off = torch.autocast(device.type, enabled=False)  # Not that around the loop.
    with left_alone(model, device), off, whole_in_mode(model, training=True):
        batch = samples.probe(samples.spread(_NUM_SAMPLES))
        names = [name for name in task.model.inputs if name in batch]
        few = {name: batch[name].to(device) for name in names}
        with torch.no_grad():
            rows = known.run_blocks(few, 0, 1)
        repeated = torch.arange(num, device=device) % len(rows)
        entries = {name: one[repeated] for name, one in few.items()}

        def timed(run: Callable[[], Any]) -> float:
            def step() -> None:
                with task.computing(device):
                    answer = run()
                _run_backward(answer, [p for p in model.parameters() if p.requires_grad])

            return _seconds(step, device)

        whole_s, short_s, fill_s = None, 0.0, 0.0
        with suppress(Exception):  # Any: it cannot be run on these entries alone, or repeated.
            with torch.no_grad():
                fill_s = _seconds(lambda: known.run_blocks(entries, 0, 1).clone(), device)
            if model not in known.blocks:  # Of the step around a teacher nothing is known.
                short_s = timed(lambda: from_rows(entries, rows[repeated], {}))
                whole_s = timed(lambda: known.partial.whole(entries))
    return RowAccount(known.partial.row.name, num, whole_s, short_s, fill_s)


def _run_backward(answer: Any, weights: list[Any]) -> None:
    learned = [one for one in tensors_in(answer) if one.requires_grad]
    if learned and weights:
        total = torch.stack([leaf.float().sum() for leaf in learned]).sum()
        torch.autograd.grad(total, weights, allow_unused=True)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the least seconds of a few runs; the first one of all also warms up."""
    found = list[float]()
    while len(found) < 2 or (len(found) <= _MOST_REPEATS and sum(found) < _ENOUGH_S):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)

"""Look whether what a Trainer's parts return may be rows, as it is looked at in a loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipetransformer.feed import Batch, Samples
from pipetransformer.loop.batches import Bundles
from pipetransformer.loop.forward import LoopCall, ModelWatch, PartialForward
from pipetransformer.loop.rows.loop_model import refuse_rounding
from pipetransformer.loop.rows.row_probe import RowProbe
from pipetransformer.model import Task, forward_parameters, parts_forward_of, row_of


def refuse_wrong_rows(task: Task, samples: Samples) -> None:
    """Raise a ValueError where a forward from parts' rows would not be the model's own."""
    layered, own = task.model, parts_forward_of(task.model)
    device = next(layered.model.parameters()).device
    row = row_of(layered)
    refuse_rounding(row, task.config)
    sides = layered.sides_of(0, len(layered.sublayers))

    def from_rows(entries: Batch, rows: Tensor, targets: Mapping[str, Tensor]) -> Any:
        read = {name: entries[name].to(device) for name in sides if name in entries}
        return own.answer(rows, {**read, **targets})

    targets = {name: name for name in layered.targets if name in forward_parameters(layered.model)}
    call = LoopCall({name: name for name in layered.inputs}, targets=targets)
    example = samples.probe([0, len(samples.dataset) // 2])
    probe = RowProbe(
        task,
        samples,
        PartialForward(task, example, call, Bundles({}, {}, lambda _: {})),
        (ModelWatch(layered.model.modules()),),
        device,
        short=from_rows,
        leave_out=lambda _: None,
    )
    if why := probe.why_not(1):
        raise ValueError(
            f"{row.name} of this {type(layered.model).__name__} cannot be frozen as "
            f"parts=: {why}. docs/frozen-parts.md says what to do"
        )

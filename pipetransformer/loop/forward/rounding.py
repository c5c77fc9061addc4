"""Find what rounded rows change of a batch, by the model's own forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipetransformer.feed import tell_of_loss, tell_of_outputs
from pipetransformer.loop.forward.forward_call import RowBatch
from pipetransformer.model import (
    Task,
    forward_parameters,
    joined_outputs,
    output_of,
    whole_in_mode,
)


def compare_rounded(
    task: Task,
    *,
    exact: RowBatch,
    rounded: RowBatch,
    targets: Mapping[str, Tensor],
    tells: bool,
) -> None:
    """Run a batch with exact rows and with rounded ones, and log what that changes.

    It is the loss where the model's forward makes one of the targets, else the outputs.

    Args:
        tells: whether this process logs. All run the batch, as a sharded model needs it.
    """
    given = {n: t for n, t in targets.items() if n in forward_parameters(task.model.model)}
    before, after = (_answer(task, batch, given) for batch in (exact, rounded))
    if not tells:
        return
    old, new = (getattr(answer, "loss", None) for answer in (before, after))
    dtype = str(task.config.cache_dtype)
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        tell_of_loss(dtype, float(old), float(new))
    else:
        old, new = (_outputs(answer) for answer in (before, after))
        tell_of_outputs(dtype, float((new - old).norm() / old.norm().clamp_min(1e-12)))


def _outputs(answer: Any) -> Tensor:
    try:
        return output_of(answer).float()
    except TypeError:  # Above parts a model may return anything.
        return joined_outputs(answer)


def _answer(task: Task, batch: RowBatch, targets: Mapping[str, Tensor]) -> Any:
    """Return what the model answers in eval mode, its frozen blocks giving a batch's rows."""
    assert batch.rows is not None
    model, device = task.model.model, batch.rows.device
    entries: dict[str, Tensor] = {**batch.entries(), **targets}
    with (
        torch.no_grad(),
        whole_in_mode(model, training=False),
        task.computing(device),
    ):
        return model(**{name: entry.to(device) for name, entry in entries.items()})

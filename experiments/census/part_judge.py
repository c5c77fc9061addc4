"""Judge a class of which a part is frozen: two epochs from rows beside a hand-written loop."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from experiments.census.judge import Outcome, is_ours, line_of, place_of
from experiments.census.part_batches import (
    NUM_SAMPLES,
    Batch,
    joined,
    loss_of,
    part_batch,
    part_samples,
)
from experiments.census.part_subjects import headed, part_of
from experiments.census.subjects import Subject
from experiments.census.tiny import build
from pipetransformer import attach

EPOCHS, _BATCH_SIZE, _RATE = 2, 3, 0.01

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Relative to a loss or to a tensor's largest value; rows change the order of sums."""


def judge_part(subject: Subject) -> Outcome:
    """Try a class: served, not cached, refused, wrong, crash or not built."""
    try:
        return _judged(subject)
    finally:
        torch.set_default_dtype(torch.float32)  # That of `_made` holds for losses, too.


def _judged(subject: Subject) -> Outcome:
    try:
        dtype, model, batch = _made(subject)
        name = part_of(model, subject.task)
        plain = copy.deepcopy(model)
        expected = _by_hand(plain, name, batch)
    except Exception as error:  # Any: the census goes on whatever a library raises.
        return Outcome("not built", line_of(error), place_of(error))
    warnings = _Warnings()
    own_log = logging.getLogger("pipetransformer")
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    own_log.addHandler(warnings)
    try:
        found = _from_rows(model, name, batch)
    except Exception as error:
        is_refusal = isinstance(error, (ValueError, TypeError)) and is_ours(error)
        return Outcome("refused" if is_refusal else "crash", line_of(error), place_of(error))
    finally:
        own_log.removeHandler(warnings)
        logging.disable(disabled)
    losses, hits, runs = found
    if difference := _difference(losses, expected, model, plain, TOLERANCE[dtype]):
        return Outcome("wrong", difference, name)
    if hits < NUM_SAMPLES or runs:
        if not warnings.texts:
            return Outcome("wrong", f"{hits} hits, {runs} runs, and no warning", name)
        return Outcome("not cached", warnings.texts[0], name)
    return Outcome("served", name, str(dtype).removeprefix("torch."))


class _Warnings(logging.Handler):
    """Hold the texts of what was warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(" ".join(record.getMessage().split()))


def _made(subject: Subject) -> tuple[torch.dtype, nn.Module, Batch]:
    """Return a model and a batch in float64 where it trains in it, else in float32.

    Raises:
        Exception: what the model's own forward or backward raises.
    """
    last: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            torch.set_default_dtype(dtype)
            torch.manual_seed(0)
            model = (headed if subject.task == "backbone" else build)(subject).to(dtype)
            batch = part_batch(model.train(), subject)
            losses = [loss_of(model, batch) for _ in range(2)]
            losses[0].backward()
        except Exception as error:
            last = error
            continue
        model.zero_grad()
        return dtype, model, batch
    assert last is not None
    raise last


def _epochs(
    model: nn.Module, batch: Batch, epoch: Callable[[Any], Iterable[Batch]], before: Any
) -> list[float]:
    bundled = frozenset(name for name, one in batch.items() if len(one) != NUM_SAMPLES)
    torch.manual_seed(1)
    loader: DataLoader[Batch] = DataLoader(
        part_samples(batch),  # type: ignore[arg-type]
        batch_size=_BATCH_SIZE,
        shuffle=True,
        collate_fn=partial(joined, bundled),
    )
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), _RATE)
    losses = []
    for _ in range(EPOCHS):
        model.train()
        before()
        for part in epoch(loader):
            optimizer.zero_grad()
            loss = loss_of(model, part)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def _by_hand(model: nn.Module, name: str, batch: Batch) -> list[float]:
    part = model.get_submodule(name)
    part.requires_grad_(False)
    losses = _epochs(model, batch, lambda loader: loader, part.eval)
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"its own losses are {losses}")
    return losses


def _from_rows(model: nn.Module, name: str, batch: Batch) -> tuple[list[float], int, int]:
    """Return losses, the last epoch's hits, and how often the part ran in it."""
    runs, hits = _count_runs(model, name), [0]
    with attach(model, parts=[name], cache=True) as cached:

        def epoch(loader: Any) -> Iterable[Batch]:
            runs[0] = 0
            yield from cached.epoch(loader)
            hits[0] = cached.stats.hits

        losses = _epochs(model, batch, epoch, lambda: None)
    return losses, hits[0], runs[0]


def _count_runs(model: nn.Module, name: str) -> list[int]:
    """Return a number that grows whenever the part runs, not what lies within it alone."""
    runs, part = [0], model.get_submodule(name)
    run = part.forward

    @wraps(run)
    def counted(*args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        return run(*args, **kwargs)

    part.forward = counted
    return runs


def _difference(
    losses: list[float], due: list[float], model: nn.Module, plain: nn.Module, tolerance: float
) -> str:
    for step, (one, other) in enumerate(zip(losses, due, strict=True)):
        if not math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance):
            return f"step {step}: the loss is {one:.9g}, that of a plain loop {other:.9g}"
    others = plain.state_dict()
    for name, tensor in model.state_dict().items():
        if not _are_close(tensor, others[name], tolerance):
            return (
                f"{name} differs by {(tensor - others[name]).abs().max():.3g} after the last step"
            )
    return ""


def _are_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)

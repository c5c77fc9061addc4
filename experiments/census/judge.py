"""Judge a class: four steps of the Trainer beside a hand-written loop."""

from __future__ import annotations

import json
import math
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.census.batches import batch_for, samples_of
from experiments.census.subjects import Subject
from experiments.census.tiny import build
from pipetransformer import FreezeSchedule, Trainer, launch, named_optimizer
from pipetransformer.model import LayeredModel, adapt

NUM_STEPS, FROZEN = 4, 2
"""In the third step blocks freeze and are cached, in the fourth they are read."""

LEARNING_RATE = 0.05
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """Say how a class ended: trains, refused, wrong, crash or not built."""

    kind: str
    reason: str = ""
    detail: str = ""


def judge(subject: Subject, *, with_pipeline: bool) -> Outcome:
    """Try a class; `with_pipeline` trains it on two processes, too."""
    try:
        dtype = _dtype_of(subject)
    except Exception as error:  # Any: the census goes on whatever a library raises.
        return Outcome("not built", line_of(error), place_of(error))
    try:
        made = _Made(subject, str(dtype).removeprefix("torch."))
        layered = adapt(made.model, lambda _: made.batch)
        num_frozen = min(FROZEN, layered.num_layers)
        found = made.trained(num_frozen)
        due = _plain_losses(subject, dtype, num_frozen)
        if difference := _difference(found, due):
            return Outcome("wrong", difference)
        if with_pipeline:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "losses.json")
                launch(
                    _train_as_rank,
                    (subject, made.dtype, num_frozen, path),
                    num_slots=2,
                    start_method="forkserver",
                )
                found = json.loads(path.read_text())
            if difference := _difference(found, due):
                return Outcome("wrong", f"K=2: {difference}")
    except (ValueError, TypeError) as error:
        kind = "refused" if is_ours(error) else "crash"
        return Outcome(kind, line_of(error), place_of(error))
    except Exception as error:
        return Outcome("crash", line_of(error), place_of(error))
    way = "recorded" if layered.is_recorded else "adapter"
    return Outcome("trains", "K=1, K=2" if with_pipeline else "K=1", f"{way} {made.dtype}")


class _Made:
    """Hold a class's model and batch in a dtype."""

    def __init__(self, subject: Subject, dtype: str) -> None:
        self.dtype = dtype
        self.model, self.batch = _model_and_batch(subject, getattr(torch, dtype))

    def trained(self, num_frozen: int, **settings: Any) -> list[float]:
        """Return the losses of four steps of the Trainer, verified before the first."""
        losses = []
        with Trainer(
            self.model,
            samples_of(self.batch),
            freeze=FreezeSchedule([0, 0, num_frozen, num_frozen]),
            optimizer=named_optimizer("sgd", LEARNING_RATE, momentum=0.9),
            epochs=NUM_STEPS,
            global_batch_size=len(next(iter(self.batch.values()))),
            cache=True,
            tied_weights="freeze",  # Or the head's matrix would train on, and nothing be cached.
            progress=False,
            seed=1,
            **settings,
        ) as trainer:
            trainer.verify()
            while not trainer.is_over:
                losses.append(trainer.step().loss)
        return losses


def _train_as_rank(subject: Subject, dtype: str, num_frozen: int, path: Path) -> None:
    losses = _Made(subject, dtype).trained(num_frozen, pipeline_length=2)
    if not path.exists():  # Both ranks return the same losses.
        path.write_text(json.dumps(losses))


def _model_and_batch(subject: Subject, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build(subject).to(dtype)
    batch = batch_for(subject)
    floats = {name: e.to(dtype) for name, e in batch.items() if e.is_floating_point()}
    return model, {**batch, **floats}


def _dtype_of(subject: Subject) -> torch.dtype:
    """Return float64 where a plain step goes through with it, else float32.

    Raises:
        Exception: what the model's own forward or backward raises.
    """
    first: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            model, batch = _model_and_batch(subject, dtype)
            losses = [_loss_of(model.train(), batch) for _ in range(2)]
            losses[0].backward()
            values = [float(loss.detach()) for loss in losses]
            if not math.isfinite(values[0]):
                raise ValueError(f"its own loss is {values[0]}")
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if not all(gradient.isfinite().all() for gradient in gradients):
                raise ValueError("its own gradient is not finite")
        except Exception as error:
            first = first or error
            continue
        if abs(values[0] - values[1]) > TOLERANCE:
            raise ValueError("its own forward is random with all dropout at 0")
        return dtype
    assert first is not None
    raise first


def _loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if "y" in batch:  # Of timm, whose models know no loss.
        return F.cross_entropy(model(batch["x"]), batch["y"])
    # Some forwards write into their targets.
    answer = model(**{name: entry.clone() for name, entry in batch.items()})
    loss: Tensor | None = getattr(answer, "loss", None)
    if loss is None:
        raise ValueError("its own forward returns no loss")
    return loss


def _plain_losses(subject: Subject, dtype: torch.dtype, num_frozen: int) -> list[float]:
    """Train as one would by hand: the model's own forward, and requires_grad."""
    model, batch = _model_and_batch(subject, dtype)
    layered = adapt(model, lambda _: batch)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        _freeze(layered, num_frozen if step >= 2 else 0)
        loss = _loss_of(model.train(), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _freeze(layered: LayeredModel, num_frozen: int) -> None:
    for name, index in layered.owners.items():
        tensor = layered.tensor(name)
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            tensor.requires_grad_(layered.sublayers[index].layer >= num_frozen)


def _difference(found: list[float], due: list[float]) -> str:
    for step, (one, other) in enumerate(zip(found, due, strict=True)):
        if not math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            return f"step {step}: the loss is {one:.7g}, that of a plain loop {other:.7g}"
    return ""


def is_ours(error: Exception) -> bool:
    """Return whether an error was raised by this project, not by a library below it."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(f"/{part}/" in frames[-1].filename for part in ("pipetransformer", "autopipe"))


def line_of(error: Exception) -> str:
    """Return an error's kind and text in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def place_of(error: Exception) -> str:
    """Return the innermost lines of code of an error."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))

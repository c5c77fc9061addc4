"""Run a loop as it is and with our change, and compare all numbers.

A loop is written once, with our change. Marks say what it was:

    cached = attach(model, freeze=FREEZE)  # new
    # was: for batch in loader:
    for batch in cached.epoch(loader):

The reference is what it was, with `freeze.apply` before each epoch.
"""

from __future__ import annotations

import inspect
import io
import logging
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from difflib import ndiff
from typing import Any, final
from unittest import mock

import accelerate.state
import lightning
import torch
import transformers
from torch import Tensor, nn

import freeze
from pipetransformer import FreezeCallback, LightningFreezeCallback, attach

FREEZE = [0, 2, 2]
"""Frozen blocks by epoch: the second makes rows, the third reads them."""
NUM_EPOCHS, NUM_SAMPLES = len(FREEZE), 16
_ROUNDED = 2e-5
"""What the order of sums may change of the largest number, over all steps in float32."""


@final
@dataclass(frozen=True)
class ForeignLoop:
    """Name a loop, and what is due of it.

    Args:
        due: "cached" or "partly", "uncached", "refused", or "wrong" where numbers differ.
        run: trains a model and returns it; `given` makes its arguments.
    """

    name: str
    due: str
    run: Callable[..., nn.Module]
    given: Callable[[], Sequence[Any]] = tuple


@final
@dataclass(frozen=True)
class Outcome:
    """Say how a loop went; `apart` is 0 where all numbers are equal bit by bit."""

    loop: ForeignLoop
    num_lines: int
    apart: float
    kind: str
    hits: int
    said: tuple[str, ...]


@final
@dataclass
class _Run:
    """Hold what a run has shown: losses and what is noted, weights, warnings and errors."""

    numbers: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    served: Any = None
    is_refused: bool = False
    layers: Sequence[nn.Module] = ()
    num_frozen: Iterator[int] = field(default_factory=lambda: iter(FREEZE))
    # By backward, how often a frozen block has run with gradients before it.
    block_runs: list[int] = field(default_factory=lambda: [0])

    def runs_at_the_end(self) -> int:
        """Return how often the frozen block has run in the last epoch's steps."""
        steps = self.block_runs[:-1]
        return sum(steps[-(len(steps) // NUM_EPOCHS) :])


_RUNS: list[_Run] = []
"""The last is the present one; loops have no argument for it, as their originals have none."""


def note(number: float | Tensor) -> None:
    """Have a number of a loop compared, such as an evaluation's."""
    _RUNS[-1].numbers.append(float(number))


def counted(model: Any, blocks: Iterable[nn.Module]) -> Any:
    """Have a model's blocks freeze, and count their runs with gradients; return the model."""
    run, layers = _RUNS[-1], [*blocks]

    def count(_module: object, _given: object, answer: Any) -> Any:
        run.block_runs[-1] += torch.is_grad_enabled()
        return answer  # A hook that only looked would have no rows.

    # The last part of the first block: hooks on the block itself act where rows are read, too.
    leaf = [part for part in layers[0].modules() if not [*part.children()]][-1]
    leaf.register_forward_hook(torch.compiler.disable(count))
    run.layers = layers
    return model


def freeze_next(model: nn.Module) -> None:
    """Freeze what the coming epoch freezes, without rows."""
    freeze.apply(model, next(_RUNS[-1].num_frozen), layers=_RUNS[-1].layers)


class Freezing(transformers.TrainerCallback):
    """Freeze as a user would, in transformers' Trainer."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        freeze_next(kwargs["model"])


class LightningFreezing(lightning.Callback):
    """Freeze as a user would, in Lightning's Trainer."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        freeze_next(pl_module)


def texts_of(run: Callable[..., Any]) -> tuple[str, str, str]:
    """Return a loop's source as it was, that of the reference, and ours."""
    source = textwrap.dedent(inspect.getsource(run))
    changed = re.compile(r"^( *)# was: (.*)\n.*\n", re.MULTILINE)
    kept = re.sub(r".*  # new\n", "", source)
    ours = re.sub(r" *# was: .*\n", "", source)
    if model := re.search(r"attach\(([\w.]+)", source):
        reference = changed.sub(rf"\1freeze_next({model[1]})\n\1\2\n", kept)
    else:
        reference = re.sub(r"FreezeCallback\(.*?\)", "Freezing()", ours)
    return changed.sub(r"\1\2\n", kept), reference, ours


def outcome_of(loop: ForeignLoop) -> Outcome:
    """Run a loop as it is with `freeze.apply`, and with our change.

    Raises:
        RuntimeError: the block that is counted does not run without rows.
    """
    was, plain, changed = texts_of(loop.run)
    num_lines = sum(line[0] == "+" for line in ndiff(was.splitlines(), changed.splitlines()))
    ours = _run(loop, changed)
    said = tuple(dict.fromkeys(ours.said))
    if ours.is_refused:
        return Outcome(loop, num_lines, 0.0, "refused", 0, said)
    reference = _run(loop, plain)
    if len(reference.block_runs) > 1 and not reference.runs_at_the_end():
        raise RuntimeError(f"{loop.name}: the block that is counted has never run")
    # A callback counts all epochs: some samples are computed ahead, and then found.
    hits, is_idle = min(ours.served.stats.hits, NUM_SAMPLES), not ours.runs_at_the_end()
    kind = "cached" if hits == NUM_SAMPLES and is_idle else "partly" if hits else "uncached"
    apart = _apart(reference, ours)
    return Outcome(loop, num_lines, apart, kind if apart <= _ROUNDED else "wrong", hits, said)


def _run(loop: ForeignLoop, text: str) -> _Run:
    """Run one text of a loop, from the same random state."""
    done = _Run()

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            done.served = make(*args, **kwargs)
            return done.served

        return made

    stand_ins: Any = {one.__name__: one for one in (Freezing, LightningFreezing, freeze_next)}
    stand_ins |= {"attach": noting(attach), "FreezeCallback": noting(FreezeCallback)}
    stand_ins["LightningFreezeCallback"] = noting(LightningFreezeCallback)
    names = {**loop.run.__globals__, **stand_ins}
    exec(compile(text, f"<{loop.name}>", "exec"), names)
    _RUNS.append(done)
    try:
        with _watched(done):
            model = names[loop.run.__name__](*loop.given())
            done.weights = {name: t.clone() for name, t in model.state_dict().items()}
            note(torch.rand(()))  # Random numbers go on alike, too.
    except (ValueError, TypeError) as error:
        if done.served is None:
            raise
        when = f" (after {len(done.block_runs) - 1} steps)" if len(done.block_runs) > 1 else ""
        done.said.append(f"{error}{when}")
        done.is_refused = True
    finally:
        _RUNS.pop()
    return done


@contextmanager
def _watched(done: _Run) -> Iterator[None]:
    """Note losses and warnings, and keep libraries quiet."""
    backward = Tensor.backward

    def noted(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        done.numbers.append(loss.item())
        done.block_runs.append(0)
        backward(loss, *args, **kwargs)

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            done.said.append(record.getMessage())

    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()
    transformers.set_seed(0)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "backward", noted))
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, ("pipetransformer", "freeze", "autocache")):
            stack.enter_context(mock.patch.object(logger, "handlers", [Listener("WARNING")]))
            stack.enter_context(mock.patch.object(logger, "propagate", False))
        yield


def _apart(reference: _Run, ours: _Run) -> float:
    """Return by how much any number differs, relative to the largest beside it."""
    one, other = ({**run.weights, "": torch.tensor(run.numbers)} for run in (reference, ours))
    if {n: t.shape for n, t in one.items()} != {n: t.shape for n, t in other.items()}:
        return float("inf")
    # Some are noise about zero, such as the keys' bias, which no answer depends on.
    gaps = ((one[n] - other[n]).double().abs().max() / one[n].abs().max().clamp_min(1e-2)
            for n in one if not torch.equal(one[n], other[n]))  # fmt: skip
    return float(max(gaps, default=0.0))

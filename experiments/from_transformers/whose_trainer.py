"""Choose whose Trainer a script runs; nothing else of the script depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import transformers

import pipetransformer.hf
from pipetransformer import FreezeSchedule

_SCHEDULE = "schedule:"


@dataclass
class TrainerArguments:
    """Hold the options by which Trainers are compared."""

    trainer: Literal["pipetransformer", "transformers"] = field(
        default="pipetransformer", metadata={"help": "whose Trainer runs"}
    )
    freeze: str = field(
        default="none",
        metadata={
            "help": "none, or schedule:0,2,4: so many frozen layers in the first, second, third "
            "epoch and from there on; of pipetransformer's Trainer only"
        },
    )


def trainer_class(options: TrainerArguments) -> Callable[..., Any]:
    """Return what takes the arguments of `transformers.Trainer` and makes a Trainer.

    Raises:
        ValueError: `freeze` is nothing known, or is asked of transformers' Trainer.
    """
    freeze = _policy(options.freeze)
    if options.trainer == "pipetransformer":
        return partial(pipetransformer.hf.Trainer, freeze=freeze)
    if freeze is not None:
        raise ValueError(
            f"--freeze {options.freeze} is not for --trainer transformers, which freezes nothing; "
            "leave one of them out"
        )
    found: Callable[..., Any] = transformers.Trainer
    return found


def _policy(given: str) -> FreezeSchedule | None:
    if given == "none":
        return None
    layers = given.removeprefix(_SCHEDULE).split(",")
    if not given.startswith(_SCHEDULE) or not all(number.isdecimal() for number in layers):
        raise ValueError(
            f"--freeze is {given!r}; give none, or schedule: and the frozen layers by epoch, such "
            "as schedule:0,2,4"
        )
    return FreezeSchedule([int(number) for number in layers])

"""Choose whose Trainer a script runs; nothing else of the script depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import transformers

import pipetransformer.hf
from freeze import POLICY_HELP, named_policy


@dataclass
class TrainerArguments:
    """Hold the options by which Trainers are compared."""

    trainer: Literal["pipetransformer", "transformers"] = field(
        default="pipetransformer", metadata={"help": "whose Trainer runs"}
    )
    freeze: str = field(
        default="none",
        metadata={"help": f"of pipetransformer's Trainer only: {POLICY_HELP}"},
    )


def trainer_class(options: TrainerArguments) -> Callable[..., Any]:
    """Return what takes the arguments of `transformers.Trainer` and makes a Trainer.

    Raises:
        ValueError: `freeze` names no policy, or is asked of transformers' Trainer.
    """
    if options.trainer == "pipetransformer":
        return partial(pipetransformer.hf.Trainer, freeze=named_policy(options.freeze))
    if options.freeze != "none":
        raise ValueError(
            f"--freeze {options.freeze} is not for --trainer transformers, which freezes nothing; "
            "leave one of them out"
        )
    found: Callable[..., Any] = transformers.Trainer
    return found

"""Run a fine-tuning script: on this process, or on several that it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from experiments.finetune import elastic
from experiments.finetune.options import RunOptions, check, parse
from experiments.rivals import plain_loop
from experiments.tasks.workload import Workload
from pipetransformer import launch
from pipetransformer.processes import world_size

T = TypeVar("T")
Describe = Callable[[RunOptions, Any], Workload]

_ELASTIC = (None, "early-stop")
_SMOKE_EPOCHS = 2


def run(kind: type[T], describe: Describe, arguments: Sequence[str] | None) -> None:
    """Parse the command line, and train what it asks for.

    Args:
        kind: dataclass of the options that only this script has.
        describe: reads what is fine-tuned, on every process.
        arguments: of the command line.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    specific, options = parse((kind, RunOptions), arguments)
    check(options, specific)
    if options.smoke:
        epochs = min(options.num_train_epochs, _SMOKE_EPOCHS)
        options = replace(options, num_train_epochs=epochs, global_batch_size=16)
    if options.processes > 1 and world_size() == 1:
        launch(_train, (describe, options, specific), num_slots=options.processes)
    else:
        _train(describe, options, specific)


def _train(describe: Describe, options: RunOptions, specific: Any) -> None:
    workload = replace(describe(options, specific), options=asdict(specific))
    if options.group_by_length and workload.length_entry is None:
        raise ValueError("--group_by_length saves nothing: samples are equally long, or padded so")
    if options.baseline in _ELASTIC:
        elastic.train(options, workload)
    else:
        plain_loop.train(options, workload)

"""Run a fine-tuning script: on this process, or on several that it starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from experiments.finetune import elastic
from experiments.finetune.baselines import PLAIN
from experiments.finetune.killed_run import refuse_ours
from experiments.finetune.options import RunOptions, check, parse
from experiments.finetune.usage import as_usage
from experiments.rivals import plain_loop
from experiments.tasks.workload import Workload
from pipetransformer import launch
from pipetransformer.processes import world_size


class OwnOptions(Protocol):
    """Hold the options that only one script has; a dataclass."""

    def check(self, options: RunOptions) -> None:
        """Raise a ValueError for what does not go together, or with options of any script."""


T = TypeVar("T")
Own = TypeVar("Own", bound=OwnOptions)
Describe = Callable[[RunOptions, Any], Workload]

_OF_SMOKE = {
    "num_train_epochs": 2,
    "global_batch_size": 16,
    "max_seq_length": 64,
    "doc_stride": 16,
    "image_size": 32,
}
"""The most that --smoke takes of options; a size that is not given is this one."""
_MADE_BY_SMOKE = ("data", "data_dir", "model_name_or_path", "weights")


def run(kind: type[Own], describe: Describe, arguments: Sequence[str] | None) -> None:
    """Parse the command line, and train what it asks for.

    Args:
        kind: dataclass of the options that only this script has.
        describe: reads what is fine-tuned, on every process.
        arguments: of the command line.
    Raises:
        UsageError: what they ask for cannot be.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with as_usage():
        specific, options = parse((kind, RunOptions), arguments)
        check(options)
        specific.check(options)
        if options.baseline in PLAIN:
            refuse_ours(Path(options.output_dir))
    if options.smoke:
        specific, options = _as_smoke(specific), _as_smoke(options)
    if options.processes > 1 and world_size() == 1:
        launch(_train, (describe, options, specific), num_slots=options.processes)
    else:
        _train(describe, options, specific)


def _as_smoke(options: T) -> T:
    """Return options with what --smoke makes itself or makes smaller; say what was asked for."""
    given: dict[str, Any] = vars(options)
    smaller = {
        name: most
        for name, most in _OF_SMOKE.items()
        if name in given and (given[name] is None or given[name] > most)
    }
    is_first = os.environ.get("RANK", "0") == "0"
    for one in fields(cast(Any, options)) if is_first else ():
        value = given[one.name]
        if one.name in smaller and value != one.default:
            print(f"--smoke: --{one.name} is {smaller[one.name]}, not {value}")
        elif one.name in _MADE_BY_SMOKE and value != one.default:
            print(f"--smoke: makes its own instead of --{one.name} {value}")
    return replace(cast(Any, options), **smaller)


def _train(describe: Describe, options: RunOptions, specific: Any) -> None:
    with as_usage():
        workload = replace(describe(options, specific), options=asdict(specific))
        if options.group_by_length and workload.length_entry is None:
            raise ValueError(
                "--group_by_length saves nothing: samples are equally long, or padded so"
            )
    train = plain_loop.train if options.baseline in PLAIN else elastic.train
    train(options, workload)

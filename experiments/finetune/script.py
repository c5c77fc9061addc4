"""Run a fine-tuning script: on this process, or on several that it starts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import Any, Protocol, TypeVar, cast

from experiments.finetune import elastic
from experiments.finetune.options import RunOptions, check, parse
from experiments.rivals import plain_loop
from experiments.tasks.workload import Workload
from pipetransformer import WorkerFailedError, launch
from pipetransformer.processes import world_size


class OwnOptions(Protocol):
    """Hold the options that only one script has; a dataclass."""

    def check(self, options: RunOptions) -> None:
        """Raise a ValueError for what does not go together, or with options of any script."""


T = TypeVar("T")
Own = TypeVar("Own", bound=OwnOptions)
Describe = Callable[[RunOptions, Any], Workload]

_ELASTIC = (None, "early-stop")
_OF_SMOKE = {
    "num_train_epochs": 2,
    "global_batch_size": 16,
    "max_seq_length": 64,
    "doc_stride": 16,
    "image_size": 32,
}
"""The most that --smoke takes of options; a size that is not given is this one."""
_MADE_BY_SMOKE = ("data", "data_dir", "model_name_or_path", "weights")


class UsageError(ValueError):
    """Say what was asked for wrongly, before anything is trained."""


def start(main: Callable[[], None]) -> None:
    """Run a script as a program: what was asked for wrongly is one line, not a traceback."""
    try:
        main()
    except (UsageError, WorkerFailedError) as error:
        sys.exit(f"error: {error}")


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
    with _as_usage():
        specific, options = parse((kind, RunOptions), arguments)
        check(options, specific)
        specific.check(options)
    if options.smoke:
        specific, options = _as_smoke(specific), _as_smoke(options)
    if options.processes > 1 and world_size() == 1:
        launch(_train, (describe, options, specific), num_slots=options.processes)
    else:
        _train(describe, options, specific)


@contextmanager
def _as_usage() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise UsageError(error) from error


def _as_smoke(options: T) -> T:
    """Return options with what --smoke makes itself or makes smaller; say what was asked for."""
    given: dict[str, Any] = vars(options)
    smaller = {
        name: most
        for name, most in _OF_SMOKE.items()
        if name in given and (given[name] is None or given[name] > most)
    }
    for one in fields(cast(Any, options)):
        value = given[one.name]
        if one.name in smaller and value != one.default:
            print(f"--smoke: --{one.name} is {smaller[one.name]}, not {value}")
        elif one.name in _MADE_BY_SMOKE and value != one.default:
            print(f"--smoke: makes its own instead of --{one.name} {value}")
    return replace(cast(Any, options), **smaller)


def _train(describe: Describe, options: RunOptions, specific: Any) -> None:
    with _as_usage():
        workload = replace(describe(options, specific), options=asdict(specific))
        if options.group_by_length and workload.length_entry is None:
            raise ValueError(
                "--group_by_length saves nothing: samples are equally long, or padded so"
            )
    if options.baseline in _ELASTIC:
        elastic.train(options, workload)
    else:
        plain_loop.train(options, workload)

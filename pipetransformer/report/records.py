"""Record a run's events, one JSON line each, with the same numbers in TensorBoard.

Every record has `kind`, `step` and `elapsed_s`. The other fields depend on its kind:

    kind         fields
    step         epoch, loss, seconds, samples, frozen, length, replicas, micro_batches,
                 cache_hits, cache_misses, cache_upgrades (misses that were read, and computed on
                 from there), learning_rate, gradient_norm
    epoch        epoch, loss, seconds, samples_per_s, breakdown (seconds per category),
                 cache_bytes (the most of rank 0's node so far); partial where the run ended
                 within it
    evaluation   epoch, loss, accuracy, seconds
    transition   frozen_before, frozen, length, replicas, micro_batches, boundaries, seconds,
                 predicted_seconds, bytes_moved, resting, reason; a step's predicted_step_s,
                 predicted_step_before_s, measured_step_before_s
    decision     the policy's `FreezeContext`: epoch, frozen_before, frozen_since, resting_before,
                 loss, metrics, ..., signals (lists by layer); frozen, reason;
                 look_seconds (of the probe), predicted_step_s (by frozen layers; null where
                 predicting would have taken long); seconds of observing, and of deciding where no
                 transition followed
    outcome      changed_step (of the transition), predicted_step_s, measured_step_s
    checkpoint   seconds (that training stopped), written_s (beside it), bytes
    end          none: the run is over, by its settings or as it was stopped; a resume may go on

Losses are means over samples. Samples, hits and misses are summed over replicas. A step's seconds
are rank 0's; an epoch's breakdown is the mean over ranks. There "transition" is deciding one and
carrying it out; "deciding" is reading signals, and deciding to change nothing. `seconds` are wall
time, `accuracy` is a fraction, `length` is a pipeline's number of stages. The step times of a
transition and its outcome exclude the filling of a cache and waits for workers. A number that is
not finite is null, because JSON has none.

A decision's record holds enough to ask another policy later (`read_decisions`).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freeze import MEASURED_SIGNALS, FreezeContext, LayerStats
from pipetransformer.durable_files import LineFile, replace_file

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Record = dict[str, Any]
RecordListener = Callable[[Mapping[str, Any]], None]

RECORDS_FILE = "records.jsonl"

_BEGIN_A_STEP = ("decision", "transition", "step")
_END_ONE = ("epoch", "evaluation", "checkpoint", "end")
"""Kinds of records before or at a step, whose `step` is its index, and after a number of steps."""

_LOGGER = logging.getLogger(__name__)


class Records:
    """Append one JSON line per step or event, and every number in it to TensorBoard.

    A resumed run appends to the file. Its `elapsed_s` continues from the last record, so time
    between the runs is not counted. Steps repeated since the last checkpoint are recorded again.
    On a full disk records are lost with one warning, and training goes on.

    Args:
        folder: gets records.jsonl; created if missing. None writes nothing.
        listener: is called with each record.
        tensorboard: whether the folder also gets tensorboard/.
    Raises:
        ValueError: no line of the file is a record (single damaged ones are left out), or it is a
            symbolic link.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        listener: RecordListener | None = None,
        tensorboard: bool = True,
    ) -> None:
        self._started_s, self._has_warned = time.monotonic(), False
        self._folder = folder
        self._listener = listener
        self._lines: LineFile | None = None
        self._board: SummaryWriter | None = None
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._started_s -= _recover(folder / RECORDS_FILE)
                self._lines = LineFile(folder / RECORDS_FILE)
                self._board = _open_board(folder / "tensorboard") if tensorboard else None
            except OSError as error:
                self._warn_once(error)

    def log(self, kind: str, step: int, **fields: Any) -> None:
        """Write one record of a kind in the table above."""
        elapsed_s = round(time.monotonic() - self._started_s, 6)
        values = finite(fields)
        record = {"kind": kind, "step": step, "elapsed_s": elapsed_s, **values}
        if self._lines is not None:
            line = json.dumps(record, allow_nan=False) + "\n"
            try:
                # Not durably: that would add a disk's latency to every step.
                self._lines.append(line.encode())
            except OSError as error:
                self._warn_once(error)
        if self._board is not None:
            try:
                for tag, number in _scalars(values, kind):
                    self._board.add_scalar(tag, number, step)
            except OSError as error:
                self._warn_once(error)
                self._close_board()
        if self._listener is not None:
            self._listener(record)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        self._close_board()

    def _close_board(self) -> None:
        if self._board is not None:
            with suppress(OSError):  # It has been warned of.
                self._board.close()
        self._board = None

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            _LOGGER.warning("records are lost in %s: %s; training goes on", self._folder, error)
        self._has_warned = True


def _open_board(folder: Path) -> SummaryWriter | None:
    """Open TensorBoard's events, if it is installed."""
    try:
        # Imported here, by the one process that writes: torch's writer imports all of TensorFlow
        # if that is installed, which takes seconds.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _LOGGER.info("no TensorBoard events: install pipetransformer[report] for them")
        return None
    return SummaryWriter(str(folder))


def read_records(path: Path) -> list[Record]:
    """Read all records of a file in the order in which they were written.

    A last line without its newline was torn by a kill and is left out.

    Raises:
        ValueError: there is no such file, or another line is not a record.
    """
    if not path.exists():
        raise ValueError(f"{path.parent} holds no {path.name}; give the folder= of a run")
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        if (record := _parse(line)) is None:
            raise ValueError(
                f"{path}, line {number}: {line[:60]!r} is not a record, a JSON object with kind, "
                "step and elapsed_s; remove the line or choose another folder"
            )
        records.append(record)
    return records


def latest_branch(records: Iterable[Record]) -> list[Record]:
    """Leave out records that a resume has discarded: steps after its checkpoint are taken again.

    A resumed run's first record is its step's decision, transition or training.
    """
    branch: list[Record] = []
    num_done = 0
    for record in records:
        if record["kind"] in _BEGIN_A_STEP:
            step = record["step"]
            if step < num_done:
                branch = [one for one in branch if one["step"] < step + (one["kind"] in _END_ONE)]
            num_done = step + (record["kind"] == "step")
        branch.append(record)
    return branch


def of_kind(records: list[Record], kind: str) -> list[Record]:
    """Select the records of a kind."""
    return [record for record in records if record["kind"] == kind]


def epochs_of(records: list[Record]) -> list[Record]:
    """Select the last record of each epoch: the whole where a run went on with a part."""
    return list({record["epoch"]: record for record in of_kind(records, "epoch")}.values())


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and {"kind", "step", "elapsed_s"} <= record.keys()
    return record if is_record else None


def _recover(path: Path) -> float:
    """Remove whole lines that are no records; return the last record's `elapsed_s`."""
    if not path.exists():
        return 0.0
    lines = path.read_bytes().split(b"\n")[:-1]
    whole = [(line, record) for line in lines if (record := _parse(line)) is not None]
    if lines and not whole:
        read_records(path)  # Another program's file: raises an error that names its first line.
    if len(whole) < len(lines):
        _LOGGER.warning(
            "%s: %d damaged lines are left out; the run goes on", path, len(lines) - len(whole)
        )
        replace_file(path, b"".join(line + b"\n" for line, _ in whole))
    return float(whole[-1][1]["elapsed_s"]) if whole else 0.0


def finite(value: Any) -> Any:
    """Return a value with None for every number in it that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return value


def _scalars(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Name every number as TensorBoard shows it: prefix/field, prefix/field/key inside a dict."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}/{name}")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}/{name}", value


_SIGNALS = tuple(field.name for field in fields(LayerStats) if field.name in MEASURED_SIGNALS)
_OTHERWISE = {"step", "layers", "num_frozen", "frozen_since", "resting", "predict"}
_PLAIN = tuple(field.name for field in fields(FreezeContext) if field.name not in _OTHERWISE)
"""Fields of a context that are recorded unchanged; older records lack the last two."""

_SPARE_S, _SPARE_SHARE = 0.01, 0.01
"""Limits of the time for predictions at a decision: absolute, and a share of the training since
the last one; the larger counts."""


@dataclass(frozen=True)
class RecordedDecision:
    """Hold a decision of a run.

    Attributes:
        context: the policy's; `predict` returns the recorded times, or the nearest earlier
            decision's where none were recorded.
        look_s: seconds of the look at the probe batch before it.
    """

    context: FreezeContext
    num_frozen: int
    reason: str
    look_s: float = 0.0

    @property
    def signals(self) -> frozenset[str]:
        """Name the signals that some layer has."""
        layers = self.context.layers
        return frozenset(s for s in _SIGNALS if any(getattr(one, s) is not None for one in layers))


def decision_fields(
    context: FreezeContext, *, num_frozen: int, reason: str, interval_s: float
) -> dict[str, Any]:
    """Return the fields of a record of kind "decision".

    Args:
        interval_s: seconds of training since the last decision, about.
    """
    # Training waits: on 8 ranks finding a pipeline for each of 12 layers takes half a second. At
    # step 0 it is worth that, as later decisions may then do without.
    spare_s = max(_SPARE_S, _SPARE_SHARE * interval_s) if context.step else math.inf
    layers = context.layers
    return {
        **{name: getattr(context, name) for name in _PLAIN if name != "metrics"},
        "metrics": dict(context.metrics),
        "frozen_before": context.num_frozen,
        "frozen_since": list(context.frozen_since),
        "frozen": num_frozen,
        "resting_before": list(context.resting),
        "reason": reason,
        "parameters": [layer.num_parameters for layer in layers],
        "signals": {name: [getattr(one, name) for one in layers] for name in signals_of(context)},
        "predicted_step_s": _predictions(context, spare_s),
    }


def signals_of(context: FreezeContext) -> dict[str, list[float]]:
    """Return the layers' known values by signal, without signals that no layer has."""
    known = {
        name: [v for layer in context.layers if (v := getattr(layer, name)) is not None]
        for name in _SIGNALS
    }
    return {name: values for name, values in known.items() if values}


def read_decisions(folder: Path) -> list[RecordedDecision]:
    """Return a run's decisions in order, without those that a resume has discarded.

    Raises:
        ValueError: the folder holds no records, or no decision of step 0; or the batch grew with
            the number of replicas.
    """
    path = folder / RECORDS_FILE
    records = latest_branch(read_records(path))
    by_step = {record["step"]: record for record in records if record["kind"] == "decision"}
    if 0 not in by_step:
        raise ValueError(
            f"{path} holds no decision of step 0; a run of this version records all of them"
        )
    if by_step[0].get("scales_batch"):
        raise ValueError(
            f"{path}: with scale_batch=True a step trained more samples the more replicas there "
            "were, and what others' steps would have trained is not known; record a run without it"
        )
    decisions = []
    seconds: list[float | None] = []  # Step 0 always has them.
    for step in sorted(by_step):
        seconds = by_step[step]["predicted_step_s"] or seconds
        decisions.append(_read(by_step[step], seconds))
    return decisions


def _read(record: Record, seconds: Sequence[float | None]) -> RecordedDecision:
    sizes = record["parameters"]
    # Older runs may have recorded signals that are no longer measured.
    signals = {name: own for name, own in record["signals"].items() if name in _SIGNALS}
    layers = tuple(
        LayerStats(f"layer {i}", i, size, **{name: own[i] for name, own in signals.items()})
        for i, size in enumerate(sizes)
    )

    def predict(num_frozen: int) -> float:
        step_s = seconds[num_frozen]
        if step_s is None:
            raise ValueError(f"no pipeline was found for {num_frozen} frozen layers")
        return step_s

    context = FreezeContext(
        **{name: record[name] for name in _PLAIN if name in record},
        step=record["step"],
        layers=layers,
        num_frozen=record["frozen_before"],
        frozen_since=tuple(record["frozen_since"]),
        resting=tuple(record["resting_before"]),
        predict=predict,
    )
    look_s = record.get("look_seconds", 0.0)
    return RecordedDecision(context, record["frozen"], record["reason"], look_s)


def _predictions(context: FreezeContext, spare_s: float) -> list[float | None] | None:
    """Return the seconds of a step by frozen layers, None for a number without a pipeline.

    All is None if predicting would take longer than `spare_s`.
    """
    # This thread's time alone: other threads' work must not count as the planner's.
    start = time.thread_time()
    predictions = [_prediction(context, 0)]
    # Half, as fewer layers left to train are divided sooner.
    if (time.thread_time() - start) * context.num_layers / 2 > spare_s:
        return None
    return predictions + [_prediction(context, num) for num in range(1, context.num_layers + 1)]


def _prediction(context: FreezeContext, num_frozen: int) -> float | None:
    try:
        return context.predict(num_frozen)
    except ValueError:
        return None

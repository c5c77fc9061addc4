"""Write every decision to disk before it is executed, so that a resume repeats it.

One JSON object a line, in the order decided; its int "step" says when the decision takes effect,
and "check" is a hash of the rest.

    {"step": 200, "num_frozen": 4, "length": 2, "check": "5f..."}    fsynced, then executed
    {"step": 400, "num_frozen": 7, "length": 1, "check": "b0..."}    a bit has flipped: dropped
    {"step": 600, "num_fro                                           killed here: never executed

A resume from the checkpoint of step s replays the decisions of steps >= s: a policy that looks at
clocks, or a planner with new measurements, might choose differently. A decision whose line is
damaged is made again, with a warning. It voids decisions of later steps that stand before it: they
belong to another course of the run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from autodp import broadcast_json
from freeze import JOURNAL_FILE, PolicyError, note_decision, read_line, sealed_line
from pipetransformer.durable_files import LineFile, fsync
from pipetransformer.elastic.decision import Decision, Proposal
from pipetransformer.model import Task
from pipetransformer.processes import World

_LOG = logging.getLogger(__name__)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read the entries in the order of their writing; warn of each line that is not as written."""
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        _LOG.warning(
            f"journal {path} ends in a torn line of {len(torn)} bytes: that decision was never "
            "executed, and is dropped"
        )
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(read_line(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _LOG.warning(
                f"journal {path}, line {number} is damaged ({error!r}): its decision is taken "
                "anew if its step is trained again"
            )
    return entries


class Journal:
    """Append decisions durably, and know those recorded for the steps to come. For rank 0 only.

    Args:
        path: created with its folder where needed.
        from_step: first step that is trained again, whose and later decisions are offered.
    """

    def __init__(self, path: Path, *, from_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._recorded: dict[int, dict[str, Any]] = {}
        if path.exists():
            for entry in read_journal(path):
                note_decision(self._recorded, entry["step"], entry)
            self._recorded = {at: one for at, one in self._recorded.items() if at >= from_step}
        elif from_step:
            _LOG.warning(
                f"journal {path} is missing: decisions from step {from_step} on are taken anew, "
                "and may differ from those of the interrupted run"
            )
        self._file = LineFile(path)
        fsync(path.parent)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one decision and wait until it is on disk; execute it only after this returns.

        A replayed decision, equal to the one recorded for its step, is not written again; another
        one ends what was recorded for later steps. Where the disk is full the decision is not
        recorded, which is warned of.
        """
        step, line = entry["step"], json.dumps(entry)
        # As text, NaN equals itself, and 1, 1.0 and True differ.
        if line == json.dumps(self._recorded.get(step)):
            return
        try:
            self._file.append(sealed_line(entry), durable=True)
        except OSError as error:
            _LOG.warning(
                f"the decision of step {step} is not in the journal: {error}; a run that is "
                "interrupted before the next checkpoint may decide otherwise"
            )
        note_decision(self._recorded, step, json.loads(line))

    def recorded(self, step: int) -> dict[str, Any] | None:
        """Return the last decision recorded for a step >= from_step, or None."""
        return self._recorded.get(step)

    def close(self) -> None:
        """Close the file; every entry is on disk already."""
        self._file.close()


@final
class Publication:
    """Have rank 0 decide, write that down, and tell it to every rank."""

    def __init__(self, task: Task, world: World) -> None:
        self._task, self._world = task, world
        self._journal: Journal | None = None

    def open_journal(self, *, from_step: int) -> None:
        """Write decisions into the run's folder, if it has one; see `Journal`."""
        folder = self._task.config.folder
        if folder is not None and self._world.is_main:
            self._journal = Journal(Path(folder) / JOURNAL_FILE, from_step=from_step)

    def recorded(self, step: int) -> tuple[Decision | None, bool]:
        """Return what the journal to repeat has for a step, and whether it fits this world."""
        entry = self._journal.recorded(step) if self._journal is not None else None
        if entry is None:
            return None, False
        return Decision.from_json(entry["decision"]), entry["world"] == plan_shape(
            self._task, self._world
        )

    def publish(self, step: int | None, choose: Callable[[], Proposal]) -> Proposal:
        """Choose on rank 0, journal the decision under its step, and tell it to every rank."""
        proposal: Proposal | None = None
        answer: dict[str, Any] = {}
        if self._world.is_main:
            try:
                proposal = choose()
                answer = {"decision": proposal.decision.to_json()}
                if self._journal is not None and step is not None:
                    shape = plan_shape(self._task, self._world)
                    self._journal.append({"step": step, "world": shape, **answer})
            except Exception as error:
                # The others wait in this broadcast, and would wait on if rank 0 just raised.
                by_policy = str(error) if isinstance(error, PolicyError) else ""
                told = {"error": repr(error), "by_policy": by_policy}
                broadcast_json(told, group=self._world.group)
                raise
        answer = broadcast_json(answer, group=self._world.group)
        if answer.get("by_policy"):
            raise PolicyError(f"rank 0: {answer['by_policy']}")
        if "error" in answer:
            raise RuntimeError(f"rank 0 could not decide: {answer['error']}")
        decision = Decision.from_json(answer["decision"])
        return Proposal(decision) if proposal is None else replace(proposal, decision=decision)

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()


_PLANNED_FOR = (
    "global_batch_size", "scale_batch", "memory_limit_bytes", "pipeline_length", "max_replicas",
    "micro_batches", "micro_batch_size", "schedule", "activation_checkpointing",
)  # fmt: skip
"""Settings that a plan depends on."""


def plan_shape(task: Task, world: World) -> dict[str, Any]:
    """Name what a plan was made for, as plain values; another one needs another plan."""
    workers = world.stage_workers
    return {
        "num_ranks": world.size,
        "slots_per_node": world.slots_per_node,
        **{name: getattr(task.config, name) for name in _PLANNED_FOR},
        "stage_workers": workers and list(workers),  # As JSON gives it back.
    }

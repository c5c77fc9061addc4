"""Say which layers freeze when: by a policy, or as another run did."""

from __future__ import annotations

from pathlib import Path

from experiments.finetune.finished_run import FinishedRun, records_file
from freeze import FreezePolicy, Replay, named_policy


def policy_of(freeze: str, replay: str | None) -> FreezePolicy:
    """Return the policy that options name.

    Raises:
        ValueError: they name none.
    """
    if replay is not None:
        return Replay(read_frozen(Path(replay)))
    try:
        return named_policy(freeze)
    except ValueError as error:
        raise ValueError(f"--freeze: {error}") from error


def read_frozen(folder: Path) -> dict[int, int]:
    """Return the frozen layers from each step on at which a run decided."""
    if not records_file(folder).exists():
        raise ValueError(f"{folder} holds no records.jsonl of a run to repeat")
    frozen: dict[int, int] = {}
    last = -1
    for record in FinishedRun(folder).records:
        if record["kind"] == "step" and record["frozen"] != last:
            last = frozen[record["step"]] = record["frozen"]
    return frozen

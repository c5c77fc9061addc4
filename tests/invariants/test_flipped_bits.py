"""Prove that no flipped bit in a run's folder goes unnoticed where it would change anything.

What a run that goes on reads is as it was written, or a warning or an error names the file. Two
files have no check: the lock, whose holder a message names, and the records, from which a run
takes nothing but the time it has taken so far.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipetransformer import CorruptCheckpointError
from pipetransformer.checkpoint import CHECKPOINTS, open_latest
from pipetransformer.checkpoint.best_model import BestModel
from pipetransformer.checkpoint.resume import _noted_launchers
from pipetransformer.config import TrainConfig
from pipetransformer.durable_files import read_sealed_json
from pipetransformer.elastic import read_looks
from pipetransformer.elastic.journal import read_journal
from pipetransformer.hf.log_history import LogHistory
from pipetransformer.processes import launcher_name
from tests.helpers.checkpoints import fit_with_marks, stop_after
from tests.helpers.marks import slow

SETTINGS = {"checkpoint_every_epochs": 1, "resume": "auto", "signals": ("probe_cka",)}
CHECKED = (
    r"(launchers|run)\.json|journal\.jsonl|checkpoints/latest|checkpoints/[^/]+/manifest\.json"
    r"|(checkpoints/[^/]+|frozen|best|probes)/[^/]+\.safetensors"
)
UNCHECKED = r"lock|records\.jsonl"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three of four epochs, the second of which was the best; return the folder."""
    folder = tmp_path_factory.mktemp("stopped")
    stop_after(folder, 9, SETTINGS)
    LogHistory(folder).begin([{"loss": 0.1, "step": 9}])
    return folder


def read_back(folder: Path) -> dict[str, Any]:
    """Return all that a run that goes on takes from its folder."""
    if launcher_name() not in _noted_launchers(folder):
        raise ValueError("launchers.json: the run is refused, as another launcher's")
    checkpoint = open_latest(folder / CHECKPOINTS, group=None)
    assert checkpoint is not None
    best = BestModel(TrainConfig(folder=folder, metric_for_best_model="mark"))
    best.load_state_dict(checkpoint.scalars["parts"]["best"])
    assert best.step == 6
    return {
        "scalars": repr(checkpoint.scalars),
        "shards": {name: checkpoint.read(name) for name in sorted(checkpoint.shards)},
        "best": best.read(),
        "journal": read_journal(folder / "journal.jsonl"),
        "looks": read_looks(folder / "probes"),
        "run": read_sealed_json(folder / "run.json"),
        "history": LogHistory(folder).read(9),
    }


def are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[k], other[k]) for k in one)
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("num_flips", [50, slow(10_000)])
def test_of_random_flips_in_a_run_s_folder_none_changes_in_silence_what_is_read_back(
    stopped: Path, caplog: pytest.LogCaptureFixture, num_flips: int
) -> None:
    whole, noticed = read_back(stopped), 0
    assert not caplog.messages
    # Each file as often as any other: most bytes are those of weights.
    files, choice = [path for path in files_of(stopped) if path.stat().st_size], random.Random(0)
    assert {"frozen", "best", "probes"} <= {path.parent.name for path in files}
    for _ in range(num_flips):
        path = choice.choice(files)
        bit = choice.randrange(8 * path.stat().st_size)
        caplog.clear()
        flip(path, bit)
        try:
            is_silent = not are_equal(read_back(stopped), whole) and not caplog.messages
            noticed += bool(caplog.messages)
        except (ValueError, CorruptCheckpointError):
            is_silent, noticed = False, noticed + 1
        flip(path, bit)
        assert not is_silent, f"bit {bit} of {path}"
    assert noticed > num_flips // 4


_opened: list[str] | None = None


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and not isinstance(arguments[0], int):
        if (arguments[2] or 0) & os.O_ACCMODE != os.O_WRONLY:
            _opened.append(os.fsdecode(arguments[0]))


def test_a_run_that_goes_on_reads_no_file_without_a_check_but_its_lock_and_records(
    stopped: Path, tmp_path: Path
) -> None:
    global _opened
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    files = {str(path): str(path.relative_to(folder)) for path in files_of(folder)}
    sys.addaudithook(_note_opened)  # For good; it does nothing once the list is gone.
    _opened = []
    try:
        fit_with_marks(folder, 3, SETTINGS)
        read = {files[path] for path in _opened if path in files}
    finally:
        _opened = None
    assert {re.sub("step-.*", "", name) for name in read} >= {"best/", "probes/", "checkpoints/"}
    others = {name for name in read if not re.fullmatch(CHECKED, name)}
    assert all(re.fullmatch(UNCHECKED, name) for name in others), others


KINDS = ("best/", "journal", "records", "lock", "launchers", "latest", "manifest", "weights")


@pytest.mark.parametrize("kind", [*KINDS[:3], *map(slow, (*KINDS[3:], "probes"))])
def test_a_run_that_goes_on_after_a_flip_learns_the_same_or_says_what_is_damaged(
    stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    expected = fit_with_marks(shutil.copytree(stopped, tmp_path / "whole"), 3, SETTINGS)
    folder = shutil.copytree(stopped, tmp_path / "run")
    path = [path for path in files_of(folder) if kind in str(path.relative_to(folder))][-1]
    caplog.clear()
    flip(path, 4 * path.stat().st_size)
    epochs = 2 if kind in ("manifest", "weights") else 3  # In the checkpoint that is used.
    try:
        found = fit_with_marks(folder, epochs, SETTINGS)
    except (ValueError, CorruptCheckpointError) as error:
        assert str(path) in str(error)
        return
    if kind == "best/":
        assert any(str(path) in text for text in caplog.messages)
    else:
        assert found["best"] == expected["best"]
        for name, tensor in expected["weights"].items():
            assert (found["weights"][name] - tensor).abs().max() <= 1e-9, name

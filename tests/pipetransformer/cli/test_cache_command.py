"""`pipetransformer cache` lists, checks and removes what runs have kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from autocache import RowField, RowLayout, RowSets
from pipetransformer.cli import main

LAYOUT = RowLayout((RowField("hidden", (4,), torch.float32), RowField("y", (), torch.int64)))
STAMP = 0x1234


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keep two sets of ten rows; of the older one, four rows are written."""
    for name, num_written, at in (("old", 4, 1_000_000), ("new", 10, 2_000_000)):
        sets = RowSets(tmp_path)
        about = {"model": "Tiny", "layers": 2, "samples": 10}
        one = sets.obtain({"data": name, "stamp": f"{STAMP:x}"}, LAYOUT, 10, about)
        ids = torch.arange(num_written)
        one.store.write(ids, STAMP, {"hidden": torch.ones(num_written, 4), "y": ids})
        one.close()
        os.utime(one.folder / "about.json", (at, at))
    return tmp_path


def names(folder: Path) -> list[str]:
    return [one.name for one in RowSets(folder).facts()]


def test_ls_names_each_set_the_last_used_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "ls", str(folder)]) == 0
    first, second, whole = capsys.readouterr().out.splitlines()
    assert first.startswith(names(folder)[0][:17]) and "10 of 10 rows" in first
    assert "4 of 10 rows" in second and "days ago  Tiny, 2 layers, 10 samples" in second
    assert whole.startswith("2 sets, ")


@pytest.mark.parametrize("how", ["name", "--all"])
def test_rm_removes_those_that_are_meant(how: str, folder: Path) -> None:
    newest, oldest = names(folder)
    which = oldest[:17] if how == "name" else how
    assert main(["cache", "rm", str(folder), which]) == 0
    assert names(folder) == ([newest] if how == "name" else [])


def test_rm_leaves_a_set_that_is_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = RowSets(folder).find({"data": "new", "stamp": f"{STAMP:x}"}, LAYOUT)
    assert used is not None
    assert main(["cache", "rm", str(folder), "--all"]) == 0
    assert "is in use, and stays" in capsys.readouterr().out
    assert names(folder) == [used.folder.name]
    used.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rm", "FOLDER", "rows-none"], "0 sets have names that begin with 'rows-none'"),
        (["ls", "FOLDER/none"], "is no folder; give the cache_folder="),
    ],
)
def test_what_is_not_there_is_said(
    given: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [one.replace("FOLDER", str(folder)) for one in given]
    assert main(["cache", *arguments]) == 1
    assert message in capsys.readouterr().err

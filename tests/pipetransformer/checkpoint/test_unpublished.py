"""Prove that a whole save is found though a kill came before the pointer named it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.checkpoint import published
from pipetransformer.checkpoint.format import clear
from pipetransformer.checkpoint.resume import resumes
from pipetransformer.config import TrainConfig
from tests.helpers.checkpoints import assert_holds_step, latest, save


def unpublish(directory: Path, *steps: int) -> None:
    """Save, and have the pointer as it was before."""
    pointer = directory / "latest"
    before = pointer.read_bytes()
    for step in steps:
        save(directory, step)
    pointer.write_bytes(before)


@pytest.mark.parametrize("steps", [(30,), (30, 40)], ids=str)
def test_a_save_that_is_whole_is_continued_from(tmp_path: Path, steps: tuple[int, ...]) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    unpublish(tmp_path, *steps)
    assert_holds_step(latest(tmp_path), steps[-1])
    names = [folder.name for folder in published(tmp_path)]
    assert names[:2] == [f"step-000000{steps[-1]}", f"step-000000{[20, *steps][-2]}"]


def test_one_without_its_manifest_is_not(tmp_path: Path) -> None:
    save(tmp_path, 20)
    unpublish(tmp_path, 30)
    (tmp_path / "step-00000030" / "manifest.json").unlink()
    assert_holds_step(latest(tmp_path), 20)


def test_one_that_is_damaged_costs_only_itself(tmp_path: Path) -> None:
    save(tmp_path, 20)
    unpublish(tmp_path, 30)
    shard = next((tmp_path / "step-00000030").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    assert_holds_step(latest(tmp_path), 20)
    save(tmp_path, 25)
    assert_holds_step(latest(tmp_path), 25)


def test_later_steps_of_a_run_that_went_back_are_not_taken_for_it(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3)
    for step in (20, 30):
        shard = next((tmp_path / f"step-000000{step}").glob("*.safetensors"))
        shard.unlink()
    assert_holds_step(latest(tmp_path), 10)
    save(tmp_path, 15, keep=3)
    assert [folder.name for folder in published(tmp_path)] == ["step-00000015", "step-00000010"]
    unpublish(tmp_path, 18)
    assert_holds_step(latest(tmp_path), 18)


def test_the_next_save_publishes_it_too(tmp_path: Path) -> None:
    save(tmp_path, 20)
    unpublish(tmp_path, 30)
    save(tmp_path, 40)
    assert sorted(one.name for one in tmp_path.glob("step-*")) == [
        "step-00000030",
        "step-00000040",
    ]
    shutil.rmtree(tmp_path / "step-00000040")
    assert_holds_step(latest(tmp_path), 30)


def test_clearing_takes_all_saves_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 20)
    unpublish(tmp_path, 30)
    others = tmp_path / "step-00000007" / "notes.txt"
    others.parent.mkdir()
    others.write_text("mine")
    clear(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000007"]
    assert others.read_text() == "mine"


@pytest.mark.parametrize(("resume", "expected"), [("replace", False), ("auto", True)])
def test_a_run_that_is_to_be_replaced_is_not_continued(
    tmp_path: Path, resume: Any, expected: bool
) -> None:
    (tmp_path / "checkpoints").mkdir()
    save(tmp_path / "checkpoints", 20)
    config = TrainConfig(folder=tmp_path, checkpoint_every_epochs=1, resume=resume)
    assert resumes(config) is expected

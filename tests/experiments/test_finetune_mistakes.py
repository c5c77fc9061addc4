"""Refuse what users of the scripts gave by mistake, and once got a number for; each a story."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from experiments.finetune.options import RunOptions, check
from experiments.rivals.plain_loop import PlainLoop
from experiments.tasks.glue import TASKS
from experiments.tasks.images import Images, _read_npz
from experiments.tasks.squad import read_questions
from pipetransformer import Trainer
from tests.experiments.smoke_runs import smoke
from tests.experiments.tiny_scripts import write_squad


def test_a_killed_run_goes_on_with_its_own_options_alone(tmp_path: Path) -> None:
    # It went on with others, and its summary said so of the whole run.
    saves = ("--checkpoint_every_epochs", "1")
    step, killed = Trainer.step, tmp_path / "killed"

    def dies(trainer: Trainer) -> Any:
        if trainer.global_step == 9:
            raise KeyboardInterrupt
        return step(trainer)

    with mock.patch.object(Trainer, "step", dies), pytest.raises(KeyboardInterrupt):
        smoke(killed, *saves)
    for option, value in (("learning_rate", "1e-2"), ("freeze", "schedule:0,1")):
        with pytest.raises(ValueError, match=f"holds a killed run with another {option}; give"):
            smoke(killed, *saves, f"--{option}", value)
    assert smoke(killed, *saves)["metrics"] == smoke(tmp_path / "whole")["metrics"]


def test_a_plain_loop_that_diverges_ends(tmp_path: Path) -> None:
    # Its table said 56 % where a sane run had 44.
    with mock.patch.object(PlainLoop, "_step", return_value=float("nan")):
        with pytest.raises(ValueError, match="step 0: the loss is nan; lower --learning_rate"):
            smoke(tmp_path / "run", "--baseline", "ddp")


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("num_train_epochs", 0, "at least 1"),
        ("processes", -2, "at least 1"),
        ("static_layers", -2, "at least 0"),
        ("weight_decay", -1.0, "at least 0"),
        ("max_grad_norm", float("nan"), "at least 0"),
        ("learning_rate", -1.0, "a number above 0"),
        ("lora_learning_rate", 0.0, "a number above 0"),
        ("budget_s", -3.0, "a number above 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(name: str, value: Any, least: str) -> None:
    options = dataclasses.replace(RunOptions(output_dir="nowhere"), **{name: value})
    with pytest.raises(ValueError, match=f"--{name} is {value}; give {least}"):
        check(options, object())


def test_an_answer_that_does_not_stand_where_it_is_said_to_is_refused(tmp_path: Path) -> None:
    path = Path(write_squad(tmp_path / "train-v1.1.json", 4))
    assert len(read_questions(path)) == 4
    content = json.loads(path.read_text())
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="of 1 questions, .* does not stand where answer_start"):
        read_questions(path)


@pytest.mark.parametrize("score", ["nan", "inf"])
def test_a_score_is_a_finite_number(score: str) -> None:
    with pytest.raises(ValueError, match=f"the score '{score}' is no finite number"):
        TASKS["stsb"].number_of(score)


def test_images_of_more_than_eight_bits_are_refused() -> None:
    deep = Image.fromarray(np.full((4, 4), 30_000, np.uint16))
    images = Images([deep], np.zeros(1, np.int64), lambda image: image)
    with pytest.raises(ValueError, match=r"image 0 has more than 8 bits a channel \(mode I;16\)"):
        images[0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2], "has 4 images of train and 3 labels; give one for each, of 0 to 9"),
        ([0, 1, 2, -100], "give one for each, of 0 to 9"),
        ([0, 1, 2, 10], "give one for each, of 0 to 9"),
    ],
)
def test_labels_that_do_not_fit_the_images_are_refused(
    tmp_path: Path, labels: list[int], message: str
) -> None:
    path = tmp_path / "few.npz"
    np.savez(path, train_x=np.zeros((4, 8, 8, 3), np.uint8), train_y=np.array(labels))
    with pytest.raises(ValueError, match=message):
        _read_npz(path, "train", 10)

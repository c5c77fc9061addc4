"""Prove that the fine-tuning scripts run from files to results, and that their rivals are fair."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from experiments import bert, vit
from experiments.finetune.finished_run import FinishedRun
from experiments.finetune.options import RunOptions
from experiments.tasks.glue import TASKS, glue_workload
from experiments.tasks.image_files import CIFARS
from experiments.tasks.images import Images, ImageSource, image_workload
from experiments.tasks.questions import cut
from experiments.tasks.smoke import make_glue, make_squad, make_text_model
from experiments.tasks.squad import read_questions
from experiments.tasks.text_model import TextSource
from freeze import FreezeContext, FreezeDecision, FreezePolicy
from pipetransformer.checkpoint import write_model_folder
from tests.helpers.marks import slow
from tests.helpers.smoke_runs import frozen_from, losses, smoke, summary

BF16 = ("--precision", "bf16")


@pytest.fixture(autouse=True)
def _asks_nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have no test of these ask anybody outside this machine."""
    asked: list[Any] = []

    def refuse(host: Any, *others: Any, **options: Any) -> Any:
        asked.append(host)
        raise OSError("there is no network")

    # A library that finds no network may go on without: what it asked for counts.
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", lambda own, address: refuse(address))
    yield
    assert not asked


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model of a smoke."""
    return make_text_model(tmp_path_factory.mktemp("model"))


class Resting(FreezePolicy):
    """Let the third of four layers rest in the first epoch, and freeze one in the second."""

    def decide(self, context: FreezeContext) -> FreezeDecision:
        if context.epoch:
            return FreezeDecision(1, "one")
        return FreezeDecision(0, "rest", resting=(2,))


def test_a_classifier_is_trained_saved_and_described(tmp_path: Path) -> None:
    found = smoke(tmp_path / "run", "--freeze", "schedule:0,2", draws=True)
    assert found["metric"] == "accuracy" and 0 <= found["metrics"]["accuracy"] <= 100
    assert found["options"]["freeze"] == "schedule:0,2" and found["steps"] == 12
    assert {"transformers", "timm", "datasets", "numpy", "torch"} <= found["versions"].keys()
    assert found["versions"]["timm"] == timm.__version__ and "cpu" in found["hardware"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.num_hidden_layers == 4
    lines = (tmp_path / "run" / "predictions.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 33
    assert frozen_from(tmp_path / "run") == {0: 0, 6: 2}
    assert (tmp_path / "run" / "report.html").exists()
    with pytest.raises(ValueError, match="holds the results of another run"):
        smoke(tmp_path / "run")


@pytest.mark.parametrize("task", ["stsb", slow("mnli")])
def test_a_task_with_one_label_or_three_has_a_smoke_too(tmp_path: Path, task: str) -> None:
    found = smoke(tmp_path / "run", "--num_train_epochs", "1", task=task)
    assert found["metric"] in found["metrics"]
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").config
    names = [config.id2label[number] for number in range(config.num_labels)]
    assert names == (["LABEL_0"] if task == "stsb" else list(TASKS[task].classes))
    sets = (
        ["predictions.tsv"]
        if task == "stsb"
        else ["predictions.tsv", "predictions_mismatched.tsv"]
    )
    assert sorted(path.name for path in (tmp_path / "run").glob("*.tsv")) == sets


def test_questions_are_answered_in_the_task_s_own_format(tmp_path: Path) -> None:
    few = ("--n_best_size", "9", "--max_answer_length", "1", "--warmup_steps", "2")
    found = smoke(tmp_path / "run", *few, task="squad")
    several = json.loads((tmp_path / "run" / "nbest_predictions.json").read_text())
    assert 1 < max(map(len, several.values())) <= 9
    assert not any(" " in one["text"] for best in several.values() for one in best)
    assert {"f1", "exact_match", "loss"} <= found["metrics"].keys()
    answers = json.loads((tmp_path / "run" / "predictions.json").read_text())
    assert set(answers) == {f"dev-{number}" for number in range(12)}
    AutoModelForQuestionAnswering.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.slow
def test_questions_without_an_answer_are_trained_and_judged(tmp_path: Path) -> None:
    found = smoke(tmp_path / "run", task="squad_v2")
    assert found["task"] == "squad_v2"
    assert {"f1", "HasAns_f1", "NoAns_exact_match", "loss"} <= found["metrics"].keys()
    smoke(tmp_path / "ddp", "--baseline", "ddp", task="squad_v2")
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "run"), abs=2e-4)


@pytest.mark.parametrize(
    ("script", "task"),
    [(bert, task) for task in TASKS if task not in ("sst2", "stsb", "mnli")] + [(vit, "cifar100")],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.slow
def test_every_other_task_has_a_smoke(tmp_path: Path, script: Any, task: str) -> None:
    found = smoke(tmp_path / "run", "--num_train_epochs", "1", script=script, task=task)
    assert found["metric"] in found["metrics"]


@pytest.mark.parametrize("task", TASKS)
def test_the_files_of_every_task_of_glue_are_read(
    tmp_path: Path, text_model: Path, task: str
) -> None:
    folder = make_glue(task, tmp_path)
    workload = glue_workload(task, TextSource(str(text_model), str(folder), 16, None, None, 0))
    sentences, classes = len(TASKS[task].sentences), max(1, len(TASKS[task].classes))
    rows = [workload.train_dataset[number] for number in range(96)]
    assert len(workload.train_dataset) == 96 and len(workload.eval_dataset) == 32
    assert max(rows[0]["token_type_ids"]) == sentences - 1
    found = workload.build(False)(**workload.collate_fn(rows))
    assert found.logits.shape == (96, classes) and found.loss.isfinite()


def test_a_question_that_leaves_no_room_for_the_text_is_named(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_text_model(tmp_path / "model"))
    question = read_questions(make_squad(tmp_path)[0])[0]
    tokens = len(tokenizer(question["question"], add_special_tokens=False)["input_ids"])
    length = tokens + 3 + 9  # With [CLS] and two [SEP] the text has 9.
    assert cut([question], tokenizer, length=length, stride=8)[0]
    with pytest.raises(ValueError, match=rf"{question['id']} has {tokens} tokens, and leaves 9 "):
        cut([question], tokenizer, length=length, stride=9)


@pytest.mark.parametrize("dataset", [slow("cifar10"), "imagenet"])
def test_images_are_read_from_files_in_their_usual_layouts(tmp_path: Path, dataset: str) -> None:
    options = ("--freeze", "schedule:0,4", "--augment", "--cache_views", "1")
    found = smoke(tmp_path / "run", *options, script=vit, task=dataset)
    assert found["metrics"]["accuracy"] >= 25
    model = timm.create_model(f"local-dir:{tmp_path / 'run' / 'model'}", pretrained=True)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10 if dataset == "cifar10" else 4)


@pytest.mark.parametrize("task", ["sst2", "squad"])
@pytest.mark.slow
def test_rivals_see_the_same_losses(tmp_path: Path, task: str) -> None:
    # Two epochs: the first fills what the second reads; or reads, and brings deeper.
    freeze = ("--freeze", "schedule:2,2", "--num_train_epochs", "2")
    deeper = ("--freeze", "schedule:1,2", "--num_train_epochs", "2")
    smoke(tmp_path / "ours", *freeze, task=task)
    replay = ("--replay", str(tmp_path / "ours"))
    expected = losses(tmp_path / "ours")
    for name, options in (
        ("ddp+freeze", freeze),
        ("ddp+freeze+cache", freeze),
        ("ddp+freeze", replay),
    ):
        folder = tmp_path / f"{name} {options[0]}"
        smoke(folder, "--baseline", name, *options, task=task)
        assert losses(folder) == pytest.approx(expected, abs=2e-4)
    smoke(tmp_path / "low", "--baseline", "ddp+freeze", *freeze, *BF16, task=task)
    smoke(tmp_path / "ours low", *freeze, *BF16, task=task)
    assert losses(tmp_path / "low") == pytest.approx(losses(tmp_path / "ours low"), abs=1e-2)
    # Both may round to the same bits, but not to those of whole precision.
    assert expected not in (losses(tmp_path / "low"), losses(tmp_path / "ours low"))
    smoke(tmp_path / "deeper", *deeper, task=task)
    smoke(tmp_path / "kept deeper", "--baseline", "ddp+freeze+cache", *deeper, task=task)
    assert losses(tmp_path / "kept deeper") == pytest.approx(losses(tmp_path / "deeper"), abs=2e-4)
    decay = ("--layer_decay", "0.5")
    smoke(tmp_path / "whole", *decay, task=task)
    smoke(tmp_path / "ddp", "--baseline", "ddp", *decay, task=task)
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "whole"), abs=2e-4)


@pytest.mark.parametrize(
    "options",
    [
        ("static", "--static_layers", "2"),
        ("small",),
        ("short", "--budget_s", "0.2"),
        ("lora", "--num_train_epochs", "1"),
        ("early-stop", "--num_train_epochs", "2"),
    ],
    ids=lambda options: options[0],
)
def test_every_rival_trains_and_reports(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = smoke(tmp_path / "run", "--baseline", *options)
    assert found["steps"] >= 1 and "accuracy" in found["metrics"]
    assert len(losses(tmp_path / "run")) == found["steps"]
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert saved.config.num_hidden_layers == (2 if options[0] == "small" else 4)


def test_plans_are_said_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--task", "sst2", "--smoke", "--output_dir", str(tmp_path / "run"), "--plan_only"]
    # As the published recipes have it; and a pipeline that the planner would not choose.
    bert.main([*given, "--checkpoint_every_epochs", "1", "--micro_batches", "4"])
    said = capsys.readouterr().out
    assert "1 processes here" in said and "cache behind 3 frozen layers" in said
    assert re.findall(r"^ +\d  1  1 +(\d+) ", said, re.MULTILINE) == ["4"] * 4
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["smoke"]


@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_metric_of_every_task_of_glue_knows_right_from_wrong(task: str) -> None:
    described = TASKS[task]
    wanted = np.array([0, 1, 1, 0, 1.0]) if described.num_labels == 1 else np.array([0, 1, 1, 0])
    right = described.metrics(wanted, wanted)
    wrong = described.metrics(1 - wanted, wanted)
    assert right[described.metric] == pytest.approx(100) and wrong[described.metric] <= 0


def test_layers_that_rest_do_so_in_a_replay_and_no_plain_loop_repeats_them(
    tmp_path: Path,
) -> None:
    smoke(tmp_path / "ours", "--freeze", f"{__name__}:Resting")
    replay = ("--replay", str(tmp_path / "ours"))
    smoke(tmp_path / "again", *replay)
    assert losses(tmp_path / "again") == losses(tmp_path / "ours")
    records = FinishedRun(tmp_path / "again").records
    rested = [one["resting"] for one in records if one["kind"] == "transition"]
    assert [2] in rested and rested[-1] == []
    with pytest.raises(ValueError, match=r"the layers \[2\] rest from step 0 on"):
        smoke(tmp_path / "plain", "--baseline", "ddp+freeze", *replay)
    assert not (tmp_path / "plain").exists()


def test_processes_of_a_smoke_make_their_files_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    specific = vit.ImageOptions(dataset="cifar10")
    options = RunOptions(output_dir=str(tmp_path), smoke=True)
    first = vit.workload_of(options, specific)
    monkeypatch.setenv("RANK", "0")
    vit.workload_of(options, specific)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.npz"))
    assert len(made) == 2 and len(first.train_dataset) == 96


def test_images_are_the_model_s_input() -> None:
    pictures = [np.full((4, 4, 3), index, np.uint8) for index in range(2)]
    images = Images(pictures, [5, 6], np.asarray)
    image, label = images[1]
    assert label == 6 and image.shape == (4, 4, 3) and len(images) == 2


def write_cifar(folder: Path, name: str) -> Path:
    """Write files in the layout of CIFAR's Python version; their hashes are not the published."""
    kind = CIFARS[name]
    own = folder / kind.base_folder
    own.mkdir(parents=True)
    key = "labels" if name == "cifar10" else "fine_labels"
    for number, (file, _) in enumerate((*kind.train_list, *kind.test_list)):
        data = np.full((2, 3072), number, np.uint8)
        (own / file).write_bytes(pickle.dumps({"data": data, key: [number, 1]}))
    names = {kind.meta["key"]: ["a", "b"]}
    (own / kind.meta["filename"]).write_bytes(pickle.dumps(names))
    return folder


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_s_python_version_is_read_if_it_is_the_published_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_cifar(tmp_path, name)
    source = ImageSource(
        "vit_tiny_patch16_224", None, False, str(folder), 32, False, 0, None, 1, 0
    )
    with (
        # A pickle may run anything: none is opened before its hash is the published one.
        mock.patch.object(pickle, "load", side_effect=AssertionError("opened")),
        pytest.raises(ValueError, match="as they are published; give the folder in which cifar"),
    ):
        image_workload(name, source)
    monkeypatch.setattr(CIFARS[name], "_check_integrity", lambda self: True)
    monkeypatch.setattr(CIFARS[name], "_load_meta", lambda self: None)
    workload = image_workload(name, source)
    assert len(workload.train_dataset) == (10 if name == "cifar10" else 2)
    image, label = workload.eval_dataset[0]
    assert image.shape == (3, 32, 32) and label in (1, 5)


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "deit_small_patch16_224"])
def test_photographs_are_evaluated_with_timm_s_own_preprocessing(
    tmp_path: Path, model: str
) -> None:
    photograph = np.random.default_rng(0).integers(0, 255, (47, 63, 3), np.uint8)
    image = Image.fromarray(photograph).resize((500, 375))
    for split in ("train", "val"):
        (tmp_path / split / "one").mkdir(parents=True)
        image.save(tmp_path / split / "one" / "0.png")
    source = ImageSource(model, None, False, str(tmp_path), 224, False, None, None, None, 0)
    given, _ = image_workload("imagenet", source).eval_dataset[0]
    config = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(model).to_dict())
    wanted = create_transform(**config, is_training=False)(image)
    assert (given - wanted).abs().max() < 1e-5


def test_a_model_in_a_folder_says_how_its_images_are_prepared(tmp_path: Path) -> None:
    model = timm.create_model("deit_tiny_patch16_224", img_size=48, num_classes=2)
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    write_model_folder(model, model.state_dict(), tmp_path / "model", None)
    for split in ("train", "val"):
        (tmp_path / split / "one").mkdir(parents=True)
        Image.new("RGB", (64, 64), (51, 102, 255)).save(tmp_path / split / "one" / "0.png")
    name = f"local-dir:{tmp_path / 'model'}"
    source = ImageSource(name, None, False, str(tmp_path), None, True, 1, None, None, 0)
    workload = image_workload("imagenet", source)
    colours = torch.tensor([(0.2 - 0.5) / 0.25, (0.4 - 0.5) / 0.25, (1.0 - 0.5) / 0.25])
    for dataset in (workload.train_dataset, workload.eval_dataset):
        image, _ = dataset[0]
        torch.testing.assert_close(image, colours[:, None, None].expand(3, 48, 48))
    assert workload.build(False)(image[None]).shape == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("views", ["1", "0"])
def test_augmented_images_are_the_same_in_every_row(tmp_path: Path, views: str) -> None:
    given = ("--augment", "--cache_views", views)
    rows = {"ours": ("--cache", "false"), "ddp+freeze": ("--baseline", "ddp+freeze")}
    if views == "1":
        rows |= {"cached": (), "kept": ("--baseline", "ddp+freeze+cache")}
    for name, own in rows.items():
        freeze = ("--freeze", "schedule:10,10")
        smoke(tmp_path / name, *given, *freeze, *own, script=vit, task="cifar10")
    expected = losses(tmp_path / "ours")
    assert len(set(expected)) == len(expected) == 12
    for name in rows:
        assert losses(tmp_path / name) == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["imagenet_vit_b", "cifar100_vit_b", "squad_bert_large"])
def test_published_settings_start_under_torchrun(tmp_path: Path, recipe: str) -> None:
    script = "bert" if recipe.startswith("squad") else "vit"
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "-m", f"experiments.{script}"]
    command += ["--recipe", recipe, "--smoke", "--output_dir", str(tmp_path / "run")]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = summary(tmp_path / "run")
    assert found["details"]["processes"] == 2 and found["options"]["precision"] == "bf16"
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert found["command"] == [command[0], *command[2:]]

"""Refuse what users of the scripts gave by mistake, and once got a number for; each a story."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    RobertaConfig,
    ViTConfig,
    ViTForImageClassification,
)

from experiments import bert, compare
from experiments.finetune.options import RunOptions, check
from experiments.finetune.series import series_of
from experiments.finetune.usage import start
from experiments.rivals.plain_loop import PlainLoop
from experiments.tasks.glue import TASKS, glue_workload
from experiments.tasks.image_files import _read_npz, read_split
from experiments.tasks.images import Images, ImageSource, build_vit, transforms
from experiments.tasks.smoke import make_glue, make_text_model
from experiments.tasks.squad import read_questions
from experiments.tasks.text_model import TextSource, load_tokenizer
from experiments.tasks.workload import Workload
from freeze import Replay, named_policy
from pipetransformer import Trainer
from pipetransformer.checkpoint import write_model_folder
from pipetransformer.cli import main
from pipetransformer.elastic import elasticity
from pipetransformer.stage import PredictionOutput
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.smoke_runs import smoke
from tests.helpers.tiny_scripts import write_squad


def test_a_killed_run_goes_on_with_its_own_options_alone(tmp_path: Path) -> None:
    # It went on with others, and its summary said so of the whole run.
    saves = ("--checkpoint_every_epochs", "1")
    train, killed = Trainer._train, tmp_path / "killed"

    def dies(at: int, trainer: Trainer) -> Any:
        if trainer.global_step == at:
            raise KeyboardInterrupt
        return train(trainer)

    for at in (3, 9):  # Where there are decisions alone, and then behind a checkpoint.
        dying = functools.partialmethod(functools.partial(dies, at))
        with mock.patch.object(Trainer, "_train", dying), pytest.raises(KeyboardInterrupt):
            smoke(killed, *saves)
        for option, value in (("learning_rate", "1e-2"), ("freeze", "schedule:0,1")):
            with pytest.raises(ValueError, match=f"holds a killed run with another {option}; "):
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
        check(options)


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


def write_sst2(folder: Path, rows: str) -> Path:
    folder.mkdir()
    for file in ("train.tsv", "dev.tsv"):
        (folder / file).write_text("sentence\tlabel\n" + rows)
    return folder


def read_sst2(model: Path, data: Path) -> Workload:
    return glue_workload("sst2", TextSource(str(model), str(data), 16, None, None, 0))


def test_a_model_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    # transformers made one of it that knows no word: every text was alike.
    model = make_text_model(tmp_path / "model")
    with pytest.raises(ValueError, match="--max_seq_length is 129, but .* has 128 positions"):
        load_tokenizer(str(model), 129)
    for path in model.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    with pytest.raises(ValueError, match="has no tokenizer: to it all words are unknown"):
        load_tokenizer(str(model), 128)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model = make_text_model(tmp_path / "model")
    BertConfig.from_pretrained(model, vocab_size=50).save_pretrained(model)
    with pytest.raises(ValueError, match=r"has \d+ tokens, and the model 50; give the model its"):
        load_tokenizer(str(model), 128)


def test_positions_of_a_roberta_begin_behind_its_padding(tmp_path: Path) -> None:
    model = make_text_model(tmp_path)
    RobertaConfig(max_position_embeddings=514, pad_token_id=1).save_pretrained(model)
    load_tokenizer(str(model), 512)
    with pytest.raises(ValueError, match="--max_seq_length is 513, but .* has 512 positions"):
        load_tokenizer(str(model), 513)


def test_predictions_are_numbered_as_the_file_is(tmp_path: Path) -> None:
    # Behind a row that lacks a field they were off by one.
    model = make_text_model(tmp_path / "model")
    data = write_sst2(tmp_path / "data", "good film\t1\nbad film\ndull film\t0\n")
    workload = read_sst2(model, data)
    found = PredictionOutput(np.array([[0.0, 1.0], [1.0, 0.0]]), None, {})
    workload.write_predictions("", found, tmp_path / "predictions")
    assert (tmp_path / "predictions.tsv").read_text() == "index\tprediction\n0\t1\n2\t0\n"


def test_files_that_hold_nothing_or_no_text_are_named(tmp_path: Path) -> None:
    model = make_text_model(tmp_path / "model")
    with pytest.raises(ValueError, match=r"dev\.tsv has no samples"):
        read_sst2(model, write_sst2(tmp_path / "empty", ""))
    data = write_sst2(tmp_path / "latin", "good film\t1\n")
    (data / "dev.tsv").write_bytes("sentence\tlabel\nschön\t1\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"dev\.tsv is no tsv file in UTF-8"):
        read_sst2(model, data)
    path = Path(write_squad(tmp_path / "train-v1.1.json", 4))
    path.write_text("\ufeff" + path.read_text())
    assert len(read_questions(path)) == 4
    path.write_bytes("schön".encode("latin-1"))
    with pytest.raises(ValueError, match=r"train-v1\.1\.json is no SQuAD file"):
        read_questions(path)
    (tmp_path / "few.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"few\.npz is no npz file of arrays"):
        _read_npz(tmp_path / "few.npz", "train", 10)
    with pytest.raises(ValueError, match=r"val is missing; give --data, a folder with"):
        read_split("imagenet", str(tmp_path), "test", None)


def test_scores_that_are_all_equal_are_refused(tmp_path: Path) -> None:
    # Their correlation is no number.
    model, data = make_text_model(tmp_path / "model"), tmp_path / "data"
    make_glue("stsb", data)
    header, row = (data / "dev.tsv").read_text().splitlines()[:2]
    (data / "dev.tsv").write_text(f"{header}\n{row}\n{row}\n")
    source = TextSource(str(model), str(data), 16, None, None, 0)
    with pytest.raises(ValueError, match="dev: all scores are equal, and correlate with nothing"):
        glue_workload("stsb", source)


def test_folders_without_a_model_of_the_kind_are_told_in_one_line(tmp_path: Path) -> None:
    # A traceback, or advice to log in to the hub.
    folder = tmp_path / "transformers"
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    ViTForImageClassification(config).save_pretrained(folder)
    (tmp_path / "config.json").write_text("{")
    source = ImageSource("", None, False, None, 32, False, 0, None, None, 0)
    for name, message in (
        (f"local-dir:{folder}", "is of ViTForImageClassification, no model of timm; give"),
        (f"local-dir:{tmp_path}", "config.json is no JSON: "),
        (f"local-dir:{tmp_path / 'none'}", "there is no .*none/config.json; give the folder"),
        (str(folder), "is a folder; timm's are given as local-dir:FOLDER"),
        ("/none", "is a folder; timm's are"),
        ("vit_nonsense", "Unknown model"),
    ):
        with pytest.raises(ValueError, match=f"--model_name_or_path {name}.*{message}"):
            transforms(dataclasses.replace(source, model=name), whole=True)
    with pytest.raises(ValueError, match="--model_name_or_path /none: there is no such folder"):
        load_tokenizer("/none", 16)
    with pytest.raises(ValueError, match="is a vit, which reads no texts; give a text model"):
        load_tokenizer(str(folder), 16)


def test_a_schedule_that_the_model_has_no_layers_for_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    # It failed at the first decision, with everything loaded and measured.
    for text in ("schedule:0,2,9", "guarded:1,schedule:0,9"):
        with mock.patch.object(elasticity, "measure", side_effect=AssertionError):
            with pytest.raises(ValueError, match=r"freezes up to 9 layers, but \d layers can"):
                smoke(tmp_path / "run", "--freeze", text)


def test_a_replay_of_a_deeper_model_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ValueError, match="repeated froze up to 9 layers, but 5 layers can freeze"):
        Trainer(
            tiny_model(), tiny_data(), loss_fn=torch.nn.CrossEntropyLoss(), freeze=Replay({0: 9})
        )


def test_a_schedule_of_other_than_numbers_is_named() -> None:
    with pytest.raises(
        ValueError, match="'schedule:0,x' names no .*'x' is no whole number of lay"
    ):
        named_policy("schedule:0,x")


def test_a_model_that_is_no_vit_is_refused() -> None:
    source = ImageSource("resnet18", None, False, "", 32, False, 0, None, None, 0)
    with pytest.raises(ValueError, match="--model_name_or_path resnet18 is a ResNet; give a Vis"):
        transforms(source, whole=True)


def test_timm_loads_a_vit_of_half_the_layers(tmp_path: Path) -> None:
    # Its folder said nothing of how many they were.
    source = ImageSource("test_vit", None, False, "", 32, False, 0, None, None, 0)
    model: Any = build_vit(source, 3, small=True)
    write_model_folder(model, model.state_dict(), tmp_path, None)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    whole = len(build_vit(source, 3, small=False).blocks)
    assert len(loaded.blocks) == len(model.blocks) == whole // 2
    assert torch.equal(loaded.blocks[-1].mlp.fc1.weight, model.blocks[-1].mlp.fc1.weight)


def test_a_smoke_says_what_it_takes_otherwise_than_it_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--num_train_epochs", "9", "--data_dir", "mine", "--max_train_samples", "16")
    found = smoke(tmp_path / "run", *given)
    said = capsys.readouterr().out
    assert "--smoke: --num_train_epochs is 2, not 9\n" in said
    assert "--smoke: makes its own instead of --data_dir mine\n" in said
    # And the summary has what was trained.
    assert found["steps"] == 2
    assert (found["options"]["num_train_epochs"], found["options"]["max_seq_length"]) == (2, 64)


def test_a_script_s_folder_is_one_that_the_command_line_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smoke(tmp_path / "run", "--freeze", "schedule:0,1", "--checkpoint_every_epochs", "1")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert main(["score", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert "the run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "nosuch"), "error: --task is 'nosuch'; choose one of squad"),
        (("--task", "sst2", "--recipe", "nosuch"), "error: --recipe nosuch: there is no "),
        (("--task", "sst2"), "error: --model_name_or_path is missing; give a folder or a name"),
    ],
)
def test_what_was_asked_for_wrongly_is_one_line(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    def asked() -> None:
        bert.main([*options, "--output_dir", str(tmp_path / "run")])

    with pytest.raises(SystemExit) as ended:
        start(asked)
    assert str(ended.value.code).startswith(message)
    assert not (tmp_path / "run").exists()


def test_processes_that_torchrun_did_not_start_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--processes is 3, torchrun started 2; leave it out"):
        smoke(tmp_path / "run", "--processes", "3")


def test_a_seed_counts_once() -> None:
    given = ["--script", "bert", "--recipe", "none", "--folder", "x", "--seeds", "0", "0"]
    with pytest.raises(ValueError, match=r"--seeds \[0, 0\] names one twice"):
        series_of(compare.parse(given))

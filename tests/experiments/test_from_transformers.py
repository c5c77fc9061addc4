"""Prove that scripts for transformers' Trainer come to the same numbers with ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import pipetransformer.hf
from experiments.from_transformers import glue, question_answering
from experiments.from_transformers.script import TrainerArguments, trainer_class
from experiments.tasks.squad import answer_tokens
from pipetransformer import FreezeSchedule
from tests.helpers.pool import Pool
from tests.helpers.tiny_scripts import answerer, classifier, write_mrpc, write_squad, write_sst2

ROOT = Path(__file__).parents[2]
USUAL = """
    --do_train --do_eval --num_train_epochs 3 --learning_rate 0.005 --warmup_steps 0.1
    --per_device_eval_batch_size 8 --logging_steps 1 --eval_strategy no --save_strategy no
    --report_to none --disable_tqdm true --use_cpu true --seed 7
""".split()  # noqa: SIM905
BATCH = "--per_device_train_batch_size"


def run(main: Any, arguments: list[str]) -> None:
    """Run a script, and close the Trainers that it leaves to the end of its process."""
    made: list[Any] = []

    class Kept(pipetransformer.hf.Trainer):  # type: ignore[misc]
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made.append(self)

    with patch("pipetransformer.hf.Trainer", Kept):
        main(arguments)
    for trainer in made:
        trainer.close()


def sst2(folder: Path) -> list[str]:
    """Write what the task needs; return the options that say so."""
    model = ["--task_name", "sst2", "--model_name_or_path", classifier(folder / "model")]
    train = ["--train_file", write_sst2(folder / "train.tsv", 45)]
    test = ["--test_file", write_sst2(folder / "test.tsv", 9, labelled=False), "--do_predict"]
    dev = ["--validation_file", write_sst2(folder / "dev.tsv", 21), "--max_seq_length", "64"]
    return [*model, *train, *dev, *test]


def mrpc(folder: Path) -> list[str]:
    """Write what the task needs; return the options that say so."""
    model = ["--task_name", "mrpc", "--model_name_or_path", classifier(folder / "model")]
    train = ["--train_file", write_mrpc(folder / "train.tsv", 40), "--pad_to_max_length"]
    length = ["--max_seq_length", "24", "--label_smoothing_factor", "0.1"]
    return [*model, *train, *length, "--validation_file", write_mrpc(folder / "dev.tsv", 21)]


def squad(folder: Path) -> list[str]:
    """Write what the task needs; return the options that say so."""
    model = ["--model_name_or_path", answerer(folder / "model"), "--max_seq_length", "22"]
    train = ["--train_file", write_squad(folder / "train.json", 40), "--doc_stride", "4"]
    return [*model, *train, "--validation_file", write_squad(folder / "dev.json", 20)]


TASKS: dict[str, tuple[Any, Any]] = {
    "sst2": (glue.main, sst2),
    "mrpc": (glue.main, mrpc),
    "squad": (question_answering.main, squad),
    "squad, padded to the longest": (
        question_answering.main,
        lambda folder: [*squad(folder), "--pad_to_max_length", "false"],
    ),
}


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def losses(folder: Path) -> list[float]:
    history = read(folder, "trainer_state.json")["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def is_time(name: str) -> bool:
    return "runtime" in name or "per_second" in name or name in ("train_loss", "total_flos")


def metrics(folder: Path) -> dict[str, float]:
    found = read(folder, "all_results.json")
    return {name: value for name, value in found.items() if not is_time(name)}


@pytest.mark.parametrize(
    "task",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("squad",))) for n in TASKS],
)
def test_a_script_logs_the_losses_and_metrics_of_transformers(task: str, tmp_path: Path) -> None:
    main, write = TASKS[task]
    options = [*write(tmp_path), *USUAL, BATCH, "8"]
    for name in ("transformers", "pipetransformer"):
        run(main, [*options, "--trainer", name, "--output_dir", str(tmp_path / name)])
    theirs, ours = tmp_path / "transformers", tmp_path / "pipetransformer"
    assert len(losses(ours)) == len(losses(theirs)) >= 15
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-4)
    assert sum(losses(ours)[-3:]) < 0.9 * sum(losses(ours)[:3])
    expected, found = metrics(theirs), metrics(ours)
    assert found.keys() == expected.keys()
    for metric in expected:
        tolerance = 1e-4 if metric.endswith("loss") else 0
        assert found[metric] == pytest.approx(expected[metric], abs=tolerance), metric
    written = {path.name for path in theirs.iterdir()} - {"training_args.bin"}
    assert written <= {path.name for path in ours.iterdir()}
    for name in {"predict_results.tsv", "eval_predictions.json"} & written:
        assert (ours / name).read_text() == (theirs / name).read_text()


def both_tasks(options: list[list[str]]) -> None:
    run(glue.main, options[0])
    run(question_answering.main, options[1])


@pytest.mark.slow
def test_two_processes_log_the_losses_and_metrics_of_one_with_the_batch_of_both(
    two_ranks: Pool, tmp_path: Path
) -> None:
    names, options = ("sst2", "squad"), []
    for name in names:
        main, write = TASKS[name]
        (tmp_path / name).mkdir()
        options.append([*write(tmp_path / name), *USUAL])
        one = str(tmp_path / name / "one")
        run(main, [*options[-1], BATCH, "8", "--output_dir", one])
    both = [
        [*one, BATCH, "4", "--output_dir", str(tmp_path / name / "two")]
        for name, one in zip(names, options, strict=True)
    ]
    two_ranks.run(both_tasks, both)
    for name in names:
        one, two = tmp_path / name / "one", tmp_path / name / "two"
        assert losses(two) == pytest.approx(losses(one), abs=1e-4)
        assert metrics(two) == pytest.approx(metrics(one), abs=1e-4)


@pytest.mark.slow
def test_a_script_runs_under_torchrun_and_freezes(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    script = ["--module", "experiments.from_transformers.glue", *sst2(tmp_path), *USUAL]
    options = [BATCH, "4", "--freeze", "schedule:0,1,2", "--output_dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*torchrun, *script, *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert len(losses(tmp_path / "run")) == 18
    lines = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    frozen = {one["epoch"]: one["frozen"] for one in steps if one["kind"] == "step"}
    assert frozen == {0: 0, 1: 1, 2: 2}


def test_a_run_goes_on_from_its_output_folder(tmp_path: Path) -> None:
    options = [*sst2(tmp_path), *USUAL, BATCH, "8", "--save_strategy", "steps"]
    # With another schedule a run of 7 steps would learn otherwise than the first 7 of 18.
    saves = [*options, "--save_steps", "5", "--lr_scheduler_type", "constant"]
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    run(glue.main, [*saves, "--output_dir", whole])
    run(glue.main, [*saves, "--output_dir", parts, "--max_steps", "7"])
    run(glue.main, [*saves, "--output_dir", parts, "--resume_from_checkpoint", parts])
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 3, (3, 3)),
        (0, 7, (3, 4)),
        (5, 6, (4, 4)),
        (8, 12, (5, 5)),
        (8, 13, (0, 0)),
        (13, 15, (0, 0)),
    ],
    ids=["first", "two", "within a token", "last", "ends beyond", "beyond"],
)
def test_an_answer_lies_on_tokens_or_is_not_all_here(
    begin: int, end: int, expected: tuple[int, int]
) -> None:
    outside = [-1, -1]
    places = [outside, outside, outside, [0, 3], [4, 7], [8, 12], outside]
    assert answer_tokens(places, begin, end) == expected


def test_an_option_chooses_whose_trainer_runs_and_when_layers_freeze() -> None:
    chosen: Any = trainer_class(TrainerArguments(freeze="schedule:0,2"))
    assert isinstance(chosen.keywords["freeze"], FreezeSchedule)
    with pytest.raises(ValueError, match="is not for --trainer transformers"):
        trainer_class(TrainerArguments("transformers", "schedule:0,2"))
    with pytest.raises(ValueError, match="'0,2' names no freeze policy"):
        trainer_class(TrainerArguments(freeze="0,2"))

"""Prove that the scripts' options and recipes say what is done, or are refused by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from experiments import bert, vit
from experiments.finetune.freezing import policy_of
from experiments.finetune.options import RunOptions, check, parse, read_recipe
from experiments.finetune.usage import UsageError
from freeze import FreezeSchedule, NeverFreeze, PaperRule
from pipetransformer import TrainConfig
from tests.helpers.smoke_runs import losses, smoke


@pytest.mark.parametrize(
    ("text", "kind"),
    [("none", NeverFreeze), ("paper:1/3", PaperRule), ("schedule:0,2", FreezeSchedule)],
)
def test_policies_go_by_name(text: str, kind: type) -> None:
    assert isinstance(policy_of(text, None), kind)


@pytest.mark.parametrize("text", ["paper", "schedule:a", "nowhere:policy", "freeze:Nobody"])
def test_what_names_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"give none, budget\[:0.5\], paper:1/3"):
        policy_of(text, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--baseline", "nobody"), "--baseline is 'nobody'; choose one of"),
        (("--baseline", "short"), "needs --budget_s"),
        (("--baseline", "static"), "needs --static_layers"),
        (
            ("--baseline", "ddp", "--freeze", "schedule:0,2"),
            "--freeze means nothing to --baseline ddp",
        ),
        (("--baseline", "ddp", "--plan_only"), "--plan_only means nothing to --baseline ddp"),
        (("--baseline", "ddp", "--memory_limit_bytes", "9"), "--memory_limit_bytes means nothing"),
        (("--baseline", "small", "--pipeline_length", "1"), "--pipeline_length means nothing"),
        (("--baseline", "lora", "--max_replicas", "1"), "--max_replicas means nothing"),
        (("--baseline", "lora", "--layer_decay", "0.9"), "--layer_decay means nothing to"),
        (("--baseline", "ddp", "--micro_batches", "2"), "--micro_batches means nothing"),
        (("--baseline", "ddp", "--cache", "false"), "--cache means nothing"),
        (("--baseline", "ddp", "--signals", "loss"), "--signals means nothing"),
        (("--baseline", "ddp", "--freeze_interval_steps", "2"), "--freeze_interval_steps means"),
        (("--baseline", "ddp", "--freeze_interval_share", ".5"), "--freeze_interval_share means"),
        (("--baseline", "ddp", "--plan", "published"), "--plan means nothing to --baseline ddp"),
        (("--baseline", "ddp", "--compile"), "--compile means nothing to --baseline ddp"),
        (("--baseline", "ddp", "--stage_workers", "1", "1"), "--stage_workers means nothing"),
        (("--patience", "2"), "--patience is for --baseline early-stop"),
        (("--lora_learning_rate", "1"), "--lora_learning_rate is for --baseline lora"),
        (("--scale_batch", "--plan_only"), "--plan_only plans for one global batch"),
        (
            ("--baseline", "ddp+freeze+cache", "--freeze", "schedule:1", "--processes", "2"),
            "in one process alone",
        ),
        (("--baseline", "ddp", "--label_smoothing_factor", "0.1"), "without label smoothing"),
        (("--baseline", "ddp+freeze", "--freeze", "schedule:9"), "9 layers are to freeze, but 4"),
        (("--baseline", "ddp+freeze", "--freeze", "paper:1/3"), "--replay RUN of such a run"),
        (("--freeze", "schedule:0,2", "--replay", "x"), "--freeze and --replay both say"),
        (
            ("--baseline", "early-stop", "--freeze", "schedule:0,2"),
            "--freeze means nothing to --baseline e",
        ),
        (("--baseline", "ddp+freeze"), r"ddp\+freeze needs --freeze, or --replay RUN"),
        (("--baseline", "ddp", "--scale_batch"), "--scale_batch means nothing to --baseline ddp"),
        (("--budget_s", "9"), "--budget_s is for --baseline short"),
        (("--baseline", "ddp", "--static_layers", "2"), "is for --baseline static"),
        (("--task", "squad", "--held_out_samples", "2"), "is for tasks of GLUE"),
        (("--doc_stride", "9"), "--doc_stride is for --task squad"),
        (("--n_best_size", "9"), "--n_best_size is for --task squad"),
        (("--max_answer_length", "9"), "--max_answer_length is for --task squad"),
        (("--task", "squad", "--n_best_size", "0"), "--n_best_size is 0; give at least 1"),
        (("--warmup_steps", "2.5"), "warmup is 2.5; choose a whole number of steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        smoke(tmp_path / "run", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cache_views", "2"), "--cache_views is 2; give 0 or more, and --augment"),
        (("--cache_views", "-1", "--augment"), "--cache_views is -1; give 0 or more"),
        (
            ("--baseline", "ddp+freeze+cache", "--freeze", "schedule:1", "--augment")
            + ("--cache_views", "0"),
            "would keep crops that never come again",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_views_that_cannot_be_are_refused(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        smoke(tmp_path / "run", *options, script=vit, task="cifar10")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--freeze", "schedul:1"), "--freeze: 'schedul:1' names no freeze policy"),
        (("--replay", "nowhere"), "--replay repeats a run of ours: nowhere is no journal"),
        (("--lr_scheduler_type", "lineer"), "is 'lineer'; choose one of"),
        (("--max_train_samples", "-5"), "--max_train_samples is -5; give at least 1"),
        (("--max_eval_samples", "0"), "--max_eval_samples is 0; give at least 1"),
        (("--max_grad_norm", "-1"), "--max_grad_norm is -1.0; give at least 0"),
        # The Trainer's own words, before its data are there.
        (("--plan", "slowest"), "plan is 'slowest'; choose one of 'fastest', 'published'"),
        (("--schedule", "2f2b"), "schedule is '2f2b'; choose one of"),
        (("--weight_versions", "all"), "weight_versions is 'all'; choose one of"),
        (("--weight_versions", "stashed"), "leave max_grad_norm out"),
        (("--stage_workers", "2"), r"stage_workers is \(2,\); choose None or whole numbers"),
        (("--stage_workers", "1", "1", "--schedule", "gpipe"), "leave schedule='gpipe' out"),
        (("--cache_keep",), "cache_keep=True would leave rows in /dev/shm"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_names_nothing_is_refused_before_any_data_are_read(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        smoke(tmp_path / "run", *options)
    assert not (tmp_path / "run").exists()


def test_a_rival_takes_of_a_recipe_what_it_can_and_says_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ours.toml").write_text('cache = false\nsignals = ["loss"]\nseed = 3')
    given = ["--recipe", str(tmp_path / "ours.toml"), "--output_dir", "", "--baseline", "ddp"]
    (options,) = parse((RunOptions,), given)
    assert (options.cache, options.signals, options.seed) == (True, [], 3)
    assert "ddp: without the recipe's --cache=False --signals loss" in capsys.readouterr().out


def test_a_rival_is_refused_beside_the_records_of_a_killed_run_of_ours(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text("{}")
    with pytest.raises(ValueError, match="holds records of ours; give a new --output_dir"):
        smoke(tmp_path, "--baseline", "ddp")


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (Path(bert.__file__).parent / "recipes").glob("*.toml"))
)
def test_a_recipe_is_what_its_script_understands(name: str, tmp_path: Path) -> None:
    kind = bert.TextOptions if "task" in read_recipe(name) else vit.ImageOptions
    given = ("--recipe", name, "--output_dir", str(tmp_path), "--seed", "7")
    specific, options = parse((kind, RunOptions), given)
    found = {**vars(specific), **vars(options)}
    assert {key: found[key] for key in read_recipe(name)} == read_recipe(name)
    assert options.seed == 7
    check(options)
    specific.check(dataclasses.replace(options, smoke=True))


def test_a_recipe_that_names_an_unknown_option_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text("epochs = 3")
    with pytest.raises(ValueError, match=r"names \['epochs'\]; known are"):
        smoke(tmp_path / "run", "--recipe", str(tmp_path / "odd.toml"))


@pytest.mark.parametrize(
    "line", ['dataset = "cifar11"', 'precision = "bf61"', "num_train_epochs = 1.5", "seed = true"]
)
def test_a_recipe_s_values_are_checked_as_those_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    (tmp_path / "odd.toml").write_text(line)
    with pytest.raises(SystemExit):
        smoke(tmp_path / "run", "--recipe", str(tmp_path / "odd.toml"), script=vit, task="cifar10")
    assert "argument --" + line.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--see", "5"], "there is no --see, 5; --help names what there is"),
        (["--warmup_ratio", "0.1"], "no --warmup_ratio (--warmup_steps below 1 is a share), 0.1;"),
        (["--bf16"], "there is no --bf16 (--precision bf16); --help"),
        (["--overwrite-output-dir"], "no --overwrite-output-dir (give a new --output_dir);"),
    ],
)
def test_options_that_are_not_here_are_refused_with_what_is(
    given: list[str], message: str
) -> None:
    # An abbreviation of --seed passed the guard of a series, whose seeds then were one.
    kinds = (bert.TextOptions, RunOptions)
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(kinds, ["--task", "sst2", "--output_dir", "x", *given])


def test_a_task_may_be_named_as_transformers_names_it() -> None:
    own, _ = parse((bert.TextOptions, RunOptions), ["--task_name", "sst2", "--output_dir", "x"])
    assert own.task == "sst2"


@pytest.mark.parametrize(
    "given",
    [
        ("--baseline", "static", "--static_layers", "99"),
        ("--baseline", "ddp+freeze", "--freeze", "schedule:0,99"),
    ],
    ids=["static", "schedule"],
)
def test_a_rival_that_is_to_freeze_more_layers_than_there_are_is_refused(
    tmp_path: Path, given: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError, match="99 layers are to freeze, but 4 can; give fewer"):
        smoke(tmp_path / "run", *given)


COMMON = ("--freeze", "schedule:1,2", "--num_train_epochs", "2")
REACHED: dict[tuple[str, ...], dict[str, Any]] = {
    ("--plan", "pipedream"): {"plan": "pipedream"},
    ("--plan", "published"): {"plan": "published"},
    ("--stage_workers", "1", "1", "--processes", "2"): {"stage_workers": (1, 1)},
    ("--weight_versions", "stashed", "--max_grad_norm", "0"): {"weight_versions": "stashed"},
    ("--activation_checkpointing", "true"): {"activation_checkpointing": True},
    ("--activation_checkpointing", "false"): {"activation_checkpointing": False},
    ("--schedule", "gpipe"): {"schedule": "gpipe"},
    ("--compile",): {"compile": True},
    ("--cuda_graph",): {"cuda_graph": True},
    ("--cache_keep", "--cache_folder", "rows"): {"cache_keep": True, "cache_folder": "rows"},
}
"""What is given to a script, and what the Trainer then has."""


@pytest.mark.parametrize(("given", "settings"), REACHED.items(), ids=map(" ".join, REACHED))
def test_an_option_is_the_trainer_s_setting(
    given: tuple[str, ...], settings: dict[str, Any]
) -> None:
    (options,) = parse((RunOptions,), ("--output_dir", "x", *given))
    check(options)
    config = TrainConfig(**options.settings())
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.slow
@pytest.mark.parametrize("script", [bert, vit], ids=["bert", "vit"])
@pytest.mark.parametrize("given", REACHED, ids=" ".join)
def test_a_run_with_the_option_learns_as_one_without(
    tmp_path: Path, given: tuple[str, ...], script: Any
) -> None:
    # One stage has no delays, so its weight versions are a plain run's weights, too.
    further = [str(tmp_path / one) if one == "rows" else one for one in given]
    plain = [*COMMON, *(("--max_grad_norm", "0") if "--max_grad_norm" in given else ())]
    task = "sst2" if script is bert else "cifar10"
    found = smoke(tmp_path / "run", *COMMON, *further, script=script, task=task)
    smoke(tmp_path / "plain", *plain, script=script, task=task)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), abs=2e-4)
    assert found["details"]["processes"] == (2 if "--processes" in given else 1)
    assert any((tmp_path / "rows").rglob("*")) == ("rows" in given)

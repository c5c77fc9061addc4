"""Prove that every bad setting is refused by its own clear message, before anything starts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from autopipe.loss import Loss, choose_loss
from freeze import FreezePolicy, Guarded, Linear, TimeBudget
from pipetransformer import LayeredModel, Trainer, adamw
from pipetransformer.checks.model_checks import refuse_model
from pipetransformer.checks.run_checks import check_world
from pipetransformer.config import TrainConfig, make_config
from pipetransformer.model import adapt
from tests.helpers.models import tiny_data, tiny_model


def each(names: str, *values: Any) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), values)


BAD_VALUES: dict[str, tuple[Any, ...]] = {
    **each(
        "epochs global_batch_size keep_checkpoints prefetch_factor freeze_interval_epochs",
        0, -1, 1.5, "3", None, True,
    ),
    **each(
        "pipeline_length max_replicas micro_batches micro_batch_size memory_limit_bytes max_steps "
        "freeze_interval_steps cache_limit_bytes cache_views prefix_chunk eval_batch_size "
        "early_stopping_patience",
        0, -1, 2.0, "8",
    ),
    "stage_workers": (2, (), (2,), (2, 0), (1.0, 1), "21"),
    **each(
        "checkpoint_every_epochs checkpoint_every_steps evaluate_every_epochs num_workers "
        "evaluate_every_steps",
        -1, 0.5, None,
    ),
    "freeze_interval_share": (0, -0.1, 1.5, "5%"),
    "signals": ("gradient_norm", ("gradient",), (["gradient_norm"],), 3),
    "probe_samples": (0, 3, 8.0, None),
    **each("step_timeout_s setup_timeout_s", 0, -1.0, math.nan, math.inf, "60"),
    **each(
        "scale_batch cache progress pin_memory remove_unused_columns group_by_length "
        "load_best_model_at_end tensorboard compile cuda_graph",
        "no", 1, None,
    ),
    "collate_fn": ("pad", 1),
    "eval_collate_fn": ("pad", 1),
    "sample_order": ("shuffled", 1),
    "resume": ("no", "Auto", 1, 0, None),
    "activation_checkpointing": ("never", "Auto", 1, 0, None),
    "learning_rate_schedule": (0.1, "cosin", None),
    "warmup": (-1, 1.0, 10.0, math.nan, True, "0.1", None),
    "layer_decay": (0, -0.5, 1.5, math.nan, "0.75"),
    "label_smoothing": (-0.1, 1.0, math.nan, "0.1", None),
    "plan": ("slowest", "Fastest", "", None, 1, ["published"]),
    "seed": (None, 0.5, "0"),
    "max_grad_norm": (0, -1.0, math.nan, "1"),
    "on_nonfinite": ("ignore", None),
    "cache_device": ("gpu", "cuda:0", None),
    "cache_check": ("some", None, True),
    "cache_dtype": ("bf16", "float32", "int4", 16),
    "tied_weights": ("tie", None, True),
    "precision": ("fp32", "bfloat16", "", 16, torch.bfloat16),
    "compile_backend": (None, 3),
    "compile_mode": ("reduce-overhead", "default", True),
    "schedule": ("1F1B", "zero-bubble", 1),
    "weight_versions": ("newest", True, 2),
    "device": ("gpu", None, 0),
    "folder": (3,),
    "compute_metrics": ("f1", {"f1": len}),
    "preprocess_logits_for_metrics": ("argmax", {"logits": len}),
    "metric_for_best_model": (None, 3),
    "greater_is_better": ("yes", 2),
    "early_stopping_threshold": (-0.1, None, "0.1", math.nan),
    "callbacks": (None, print, "Diary"),
    "cache_folder": (None, 3, [], ["rows", 3]),
    "cache_keep": (None, 1, "yes"),
    "cache_fingerprint": (3, True),
    "parts": (None, "tower", [3], {"tower"}),
    "metrics": (len, {"f1": 0.5}, {1: len}, {"loss": len}, {"epoch": len}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}={value!r}")
        for name, values in BAD_VALUES.items()
        for value in values
    ],
)
def test_a_bad_value_is_refused_by_name_with_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is {re.escape(repr(value))}; choose \w+"):
        make_config({name: value})


def test_weights_in_bfloat16_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"bf16-pure.*lose every update smaller .*choose 'bf16'"):
        make_config({"precision": "bf16-pure"})


def test_no_setting_but_the_label_goes_unchecked() -> None:
    unchecked = {field.name for field in dataclasses.fields(TrainConfig)} - set(BAD_VALUES)
    assert unchecked == {"label"}


def test_help_has_the_default_the_rule_and_the_meaning_of_every_setting() -> None:
    told = re.findall(r"^(\w+) = (.*)((?:\n    .*)+)", TrainConfig.__doc__ or "", re.MULTILINE)
    fields = dataclasses.fields(TrainConfig)
    assert [name for name, *_ in told] == [field.name for field in fields]
    lines = {name: (default, *below.strip().splitlines()) for name, default, below in told}
    assert lines["progress"] == ("True", "True or False", "    Show a progress bar on rank 0.")
    assert lines["max_steps"][:2] == ("None", "None or a whole number, at least 1")
    unruled = {name for name, texts in lines.items() if len(texts) < 3}
    assert unruled == {"label"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile_backend": "eager"}, "have no effect without compile=True"),
        ({"compile_mode": "max-autotune-no-cudagraphs"}, "have no effect without compile=True"),
        (
            {
                "compile": True,
                "compile_backend": "eager",
                "compile_mode": "max-autotune-no-cudagraphs",
            },
            "which inductor alone knows, and compile_backend is 'eager'; leave one",
        ),
        ({"checkpoint_every_epochs": 1}, "need a folder to save to; give folder="),
        ({"checkpoint_every_steps": 5}, "need a folder to save to; give folder="),
        ({"resume": True}, "need a folder to save to; give folder="),
        ({"resume": True, "folder": "runs/a"}, "resume=True .* would never save again"),
        ({"resume": "auto", "folder": "runs/a"}, "resume='auto' .* would never save again"),
        (
            {"micro_batches": 9, "global_batch_size": 8},
            "micro_batches is 9 for a global_batch_size of 8",
        ),
        (
            {"micro_batch_size": 9, "global_batch_size": 8},
            "micro_batch_size is 9 for a global_batch_size of 8",
        ),
        (
            {"freeze_interval_steps": 4, "freeze_interval_share": 0.1},
            "freeze_interval_steps and freeze_interval_share are given, .*; give one of them",
        ),
        ({"micro_batch_size": 4, "micro_batches": 2}, "follows from the other: give one of them"),
        ({"micro_batch_size": 4, "plan": "published"}, "plan='published' chooses the micro-bat"),
        ({"warmup": 5}, "warmup is 5, but learning_rate_schedule is a function, which says it"),
        (
            {"warmup": 5, "learning_rate_schedule": "constant"},
            "warmup is 5, but .*'constant' has none; choose 'constant_with_warmup'",
        ),
        ({"cache_keep": True}, "cache_keep=True would leave rows in /dev/shm,"),
        (
            {"cache_keep": True, "cache_folder": "rows", "cache_device": "cuda"},
            "cache_keep=True keeps rows in a file, and cache_device is 'cuda'",
        ),
        (
            {"cache_keep": True, "cache_folder": ["rows", "more"]},
            "cache_keep=True keeps rows in one folder, and cache_folder names 2; name one",
        ),
        ({"cache_folder": ["rows", "rows"]}, r"cache_folder is \['rows', 'rows'\] and .* once"),
        ({"cache_limit_bytes": [1, 2]}, r"cache_limit_bytes is \[1, 2\]; .* one for each"),
        ({"cache_fingerprint": "v1"}, "'v1', which has no effect without cache_keep=True"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(settings)


def test_unknown_settings_are_all_named_with_what_to_give() -> None:
    known = (
        r"'batchsize', 'epoch'; did you mean .*'epochs'.*[?] help\(pipetransformer.TrainConfig\)"
    )
    with pytest.raises(ValueError, match=known):
        make_config({"epoch": 3, "batchsize": 8, "seed": 1})


def test_settings_that_make_sense_are_kept_as_given(tmp_path: Path) -> None:
    settings = {
        "epochs": 3,
        "seed": -7,
        "max_grad_norm": 1,
        "pipeline_length": None,
        "schedule": "gpipe",
        "learning_rate_schedule": "polynomial",
        "warmup": 0.06,
        "layer_decay": 0.75,
        "label_smoothing": 0.1,
        "metrics": {"f1": lambda output, target: (0.0, 1.0)},
        "folder": tmp_path,
        "checkpoint_every_epochs": 2,
        "checkpoint_every_steps": 100,
        "resume": "auto",
        "micro_batches": 32,
    }
    config = make_config(settings)
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("length", "num_ranks", "slots", "allowed"),
    [
        (3, 4, 4, [1, 2, 4]),
        (8, 4, 4, [1, 2, 4]),
        (2, 1, 1, [1]),
        (2, 6, 3, [1, 3, 6]),
        (4, 12, 6, [1, 2, 3, 6, 12]),
    ],
)
def test_a_length_that_does_not_fit_the_ranks_is_refused_with_those_that_do(
    length: int, num_ranks: int, slots: int, allowed: list[int]
) -> None:
    with pytest.raises(
        ValueError,
        match=rf"length {length} does not fit {num_ranks} processes "
        rf"with {slots} .*{re.escape(str(allowed))}",
    ):
        check_world(TrainConfig(pipeline_length=length), num_ranks, slots)
    for good in allowed:
        check_world(TrainConfig(pipeline_length=good), num_ranks, slots)


def test_a_batch_smaller_than_the_replicas_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"global_batch_size 3 is smaller than the 4 replicas .*least 4"
    ):
        check_world(TrainConfig(global_batch_size=3), 4, 4)
    check_world(TrainConfig(global_batch_size=4), 4, 4)
    check_world(TrainConfig(global_batch_size=2, pipeline_length=2), 4, 4)
    with pytest.raises(ValueError, match="fewer micro-batches of micro_batch_size 3 .* at most 2"):
        check_world(TrainConfig(global_batch_size=8, micro_batch_size=3), 4, 4)
    check_world(TrainConfig(global_batch_size=7, micro_batch_size=2), 4, 4)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.SyncBatchNorm(8), nn.LazyBatchNorm2d()])
def test_batch_normalisation_is_refused_by_its_name(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.ReLU(), norm), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=rf"'1\.1' is a {type(norm).__name__}: .*LayerNorm"):
        refuse_model(adapt(model), None)


def test_the_given_loss_wins_over_the_model_s_own() -> None:
    plain = adapt(tiny_model())
    model = LayeredModel(
        plain.model, plain.sublayers, inputs=("x",), targets=("y",), loss_fn=torch.dist
    )
    assert choose_loss(None, model.loss_fn, model="Sequential") == Loss(torch.dist)
    assert choose_loss(torch.dot, model.loss_fn, model="Sequential") == Loss(torch.dot)


class Stream(IterableDataset[Tensor]):
    """A dataset that can only be read in its own order."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(4, 6))

    def __repr__(self) -> str:
        return "Stream()"  # In a test's name, which must be the same wherever it is collected.


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"epoch": 3}, ValueError, "unknown setting.* 'epoch'; did you mean 'epochs'[?] help"),
        ({"batch_size": 8}, ValueError, "did you mean .*'global_batch_size'.*[?] help"),
        ({"freze": 1}, ValueError, "did you mean 'freeze'[?] help"),
        ({"freeze": "shedule:0,2"}, ValueError, "y; did you mean 'schedule:0,2'[?]$"),
        ({"zzz": 8}, ValueError, r"unknown setting\(s\) 'zzz'; help\("),
        ({"epochs": 0}, ValueError, "epochs is 0"),
        ({"pipeline_length": 2}, ValueError, "length 2 does not fit 1 processes"),
        ({"device": "cuda"}, ValueError, "device='cuda' needs a GPU"),
        ({"loss_fn": None}, ValueError, "no loss of its own; give loss_fn="),
        ({"model": nn.Linear(6, 3)}, ValueError, "this Linear has no row of blocks"),
        ({"model": with_batch_norm()}, ValueError, "'1' is a BatchNorm1d"),
        ({"train_dataset": Stream()}, TypeError, r"train_dataset \(Stream\) has no length"),
        ({"train_dataset": []}, ValueError, "train_dataset is empty"),
        ({"eval_dataset": Stream()}, TypeError, r"eval_dataset \(Stream\) has no length"),
        ({"freeze": 3.5}, TypeError, "policy"),
    ],
    ids=str,
)
def test_a_trainer_refuses_bad_input_before_it_joins_other_processes(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        "torch.distributed.init_process_group",
        lambda *_args, **_settings: pytest.fail("a process group was started"),
    )
    given = {
        "model": tiny_model(),
        "train_dataset": tiny_data(),
        "loss_fn": nn.CrossEntropyLoss(),
        "progress": False,
        **changes,
    }
    with pytest.raises(error, match=message):
        Trainer(given.pop("model"), given.pop("train_dataset"), **given)


@pytest.mark.parametrize(
    ("set_s", "predicted_s", "limit_s"),
    [(None, 0.0, 60.0), (None, 2.9, 60.0), (None, 10.0, 200.0), (5.0, 10.0, 5.0)],
)
def test_a_wait_within_a_step_is_limited_as_set_or_by_twenty_steps_and_a_minute(
    set_s: float | None, predicted_s: float, limit_s: float
) -> None:
    config = make_config({"step_timeout_s": set_s})
    assert config.step_limit_s(predicted_s) == limit_s
    # A rank may compile within a step, while the others wait.
    assert dataclasses.replace(config, compile=True).step_limit_s(predicted_s) == limit_s + 600.0


def test_a_policy_s_own_interval_holds_where_none_is_set() -> None:
    def share_of(freeze: FreezePolicy, **settings: Any) -> float | None:
        given = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": adamw(1e-3), "freeze": freeze}
        with Trainer(tiny_model(), tiny_data(), **given, **settings) as trainer:
            return trainer.config.freeze_interval_share

    assert share_of(TimeBudget(0.5)) == 0.02
    assert share_of(Guarded(TimeBudget(0.5))) == 0.02
    assert share_of(TimeBudget(0.5), freeze_interval_share=0.1) == 0.1
    assert share_of(TimeBudget(0.5), freeze_interval_steps=3) is None
    assert share_of(TimeBudget(0.5), epochs=4, freeze_interval_epochs=2) is None
    assert share_of(Linear()) is None


@pytest.mark.parametrize("freeze", [1, [1], (0, 1), "schedule:0,1"])
def test_layers_to_freeze_may_be_given_as_numbers(freeze: Any) -> None:
    with Trainer(
        tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss(), freeze=freeze, epochs=2
    ) as trainer:
        trainer.fit()
        assert trainer.decision.num_frozen == 1


@pytest.mark.parametrize("freeze", [-1, [0, "2"], True, "often"])
def test_what_says_nothing_of_freezing_is_refused(freeze: Any) -> None:
    with pytest.raises(ValueError, match="give a number of blocks, or one for each epoch"):
        Trainer(tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss(), freeze=freeze)

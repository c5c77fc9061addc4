"""Schedules by name are transformers' own at every step; ours rise and fall as drawn."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from pipetransformer import cosine_with_warmup, named_schedule
from pipetransformer.config import TrainConfig, constant
from pipetransformer.feed import Timeline

NUM_STEPS = 60
PEAK = 3e-4

OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "linear": ({},),
    "cosine": ({}, {"num_cycles": 1.5}),
    "cosine_with_restarts": ({}, {"num_cycles": 3}),
    "polynomial": ({}, {"power": 2.0, "lr_end": 1e-5}),
    "constant": ({},),
    "constant_with_warmup": ({},),
    "inverse_sqrt": ({}, {"timescale": 7}),
    "cosine_with_min_lr": ({"min_lr": 1e-5}, {"min_lr_rate": 0.1, "num_cycles": 1.5}),
    "cosine_warmup_with_min_lr": ({"min_lr": 1e-5}, {"min_lr_rate": 0.1}),
    "warmup_stable_decay": (
        {"num_decay_steps": 15},
        {"num_decay_steps": 9, "num_stable_steps": 20, "min_lr_ratio": 0.2},
        {"num_decay_steps": 20, "decay_type": "linear"},
        {"num_decay_steps": 20, "decay_type": "1-sqrt"},
    ),
}


def transformers_rates(name: str, warmup_steps: int, options: dict[str, Any]) -> list[float]:
    """Return the learning rate of every step of a run."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, warmup_steps, NUM_STEPS, dict(options))
    rates = []
    for _ in range(NUM_STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7, 0.06, 0.5])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_schedule_by_name_is_transformers_own_at_every_step(name: str, warmup: float) -> None:
    steps = math.ceil(warmup * NUM_STEPS) if isinstance(warmup, float) else warmup
    for options in OPTIONS[name]:
        if name == "constant":
            warmup = 0  # transformers ignores it; here it is refused.
        schedule = named_schedule(name, warmup=warmup, learning_rate=PEAK, **options)
        ours = [PEAK * schedule(step, NUM_STEPS) for step in range(NUM_STEPS)]
        assert ours == transformers_rates(name, steps, options)


def test_a_run_takes_a_name_with_the_optimizer_s_learning_rate() -> None:
    config = TrainConfig(
        epochs=4, global_batch_size=2, learning_rate_schedule="polynomial", warmup=0.1
    )
    timeline, ours = Timeline(config, 30, PEAK), []
    while not timeline.is_over:
        ours.append(timeline.clock(1).learning_rate)
        timeline.advance(2)
    assert ours == transformers_rates("polynomial", 6, {})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosin", {}, r"learning_rate_schedule is 'cosin'; choose one of 'linear', .*, or a func"),
        ("reduce_lr_on_plateau", {}, r"follows a metric, but here the rate is a function of the"),
        ("greedy", {}, r"is 'greedy', which follows a metric"),
        (
            "cosine",
            {"power": 2},
            r"no schedule 'cosine' with {'power': 2}: .*argument 'power'; give",
        ),
        ("polynomial", {}, r"lr_end of 'polynomial' is 1e-07, and the learning_rate None; give"),
        ("cosine_with_min_lr", {"min_lr": 1.0, "learning_rate": 0.1}, r"and a min_lr below it"),
        (
            "cosine_with_min_lr",
            {"min_lr": 0.0, "min_lr_rate": 0.1},
            r"Only one of min_lr or min_lr_rate",
        ),
        ("cosine_with_min_lr", {}, r"One of min_lr or min_lr_rate should be set"),
        ("warmup_stable_decay", {}, r"'num_decay_steps'; give learning_rate_schedule="),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 3, "decay_type": "step"},
            r"Unknown decay type: step, expected",
        ),
        ("linear", {"warmup": 1.5}, r"warmup is 1\.5; choose a whole number of steps"),
        ("constant", {"warmup": 3}, r"warmup is 3, but .*'constant' has none; choose 'constant_w"),
    ],
)
def test_what_makes_no_schedule_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        named_schedule(name, **options)


def test_a_name_without_transformers_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    needed = "learning_rate_schedule='linear' needs the package transformers; install pipetr"
    with pytest.raises(ImportError, match=needed):
        TrainConfig(learning_rate_schedule="linear")
    assert TrainConfig(learning_rate_schedule=cosine_with_warmup()).warmup == 0


def test_a_rate_of_zero_needs_no_learning_rate() -> None:
    factors = [named_schedule("polynomial", lr_end=0)(step, 4) for step in range(5)]
    assert factors == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_step_between_two_has_a_rate_between_theirs() -> None:
    schedule = named_schedule("linear", warmup=4)
    assert [schedule(step, 8) for step in (0, 0.5, 3.5, 4, 7.5, 8)] == [
        0.0, 0.125, 0.875, 1.0, 0.125, 0.0,
    ]  # fmt: skip


# Legend: warm-up of w = 20 of 100 steps: (step + 1) / (w + 1), then half a cosine to zero.
@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 1 / 21),
        (9.5, 0.5),
        (19, 20 / 21),
        (20, 1.0),
        (40, 0.5 + 0.25 * math.sqrt(2)),
        (60, 0.5),
        (80, 0.5 - 0.25 * math.sqrt(2)),
        (100, 0.0),
    ],
)
def test_cosine_schedule_rises_linearly_and_falls_to_zero(step: float, factor: float) -> None:
    assert cosine_with_warmup(0.2)(step, 100) == pytest.approx(factor, abs=1e-12)


def test_cosine_schedule_without_warmup_starts_at_the_peak() -> None:
    assert [cosine_with_warmup(0.0)(step, 2) for step in (0, 1, 2)] == pytest.approx(
        [1.0, 0.5, 0.0], abs=1e-12
    )


def test_cosine_schedule_of_a_single_step_is_positive() -> None:
    assert 0 < cosine_with_warmup()(0, 1) <= 1


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2, math.nan])
def test_cosine_schedule_refuses_a_warmup_outside_the_run(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"warmup_fraction is {fraction}; choose"):
        cosine_with_warmup(fraction)


def test_constant_schedule_is_one_at_every_step() -> None:
    assert {constant(step, 10) for step in range(11)} == {1.0}

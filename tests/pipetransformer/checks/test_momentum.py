"""Prove when momentum beside gradients of older weights is warned of, and the share it says."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from pipetransformer.checks.run_checks import about_momentum
from pipetransformer.config import TrainConfig
from tests.helpers.delayed import stream
from tests.helpers.measured import measuring, never
from tests.helpers.pool import Pool
from tests.helpers.scenario import Scenario, Shape, make_trainer, run_to_end

MOMENTUM = 0.9


def about(group: dict[str, Any], num_ranks: int = 2, **settings: Any) -> str:
    config = TrainConfig(epochs=1, global_batch_size=8, **settings)
    return about_momentum(config, json.dumps([group]), num_ranks)


@pytest.mark.parametrize("group", [{"momentum": MOMENTUM}, {"betas": [MOMENTUM, 0.999]}])
def test_momentum_is_warned_of_where_weights_are_older(group: dict[str, Any]) -> None:
    assert "momentum is 0.9" in about(group, weight_versions="stashed")
    assert about(group) == ""
    assert about(group, num_ranks=1, weight_versions="stashed") == ""
    assert about(group, weight_versions="stashed", pipeline_length=1) == ""


@pytest.mark.parametrize("group", [{"momentum": 0}, {"betas": None}, {"lr": 0.1}])
def test_an_optimizer_without_momentum_is_not_warned_of(group: dict[str, Any]) -> None:
    assert about(group, weight_versions="vertical_sync") == ""


def is_stable(rate: float, delay: int) -> bool:
    """Return whether momentum descends a parabola of curvature 1 by gradients of older points."""
    points = [1.0] * (delay + 2)
    for _ in range(20_000):
        velocity = MOMENTUM * (points[-1] - points[-2])
        points.append(points[-1] + velocity - rate * points[-1 - delay])
        if abs(points[-1]) > 1e6:
            return False
    return True


def largest_rate(delay: int) -> float:
    low, high = 0.0, 8.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if is_stable(middle, delay) else (low, middle)
    return low


def test_the_share_of_the_largest_stable_rate_is_what_a_parabola_shows() -> None:
    share = largest_rate(1) / largest_rate(0)
    assert share == pytest.approx((1 - MOMENTUM) / (2 * (1 + MOMENTUM)), rel=0.02)
    assert f"falls to {share:.2g} of" in about({"momentum": MOMENTUM}, weight_versions="stashed")


@measuring(never)
def warned(scenario: Scenario) -> str:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pipetransformer")
    logger.addHandler(handler)
    try:
        with make_trainer(scenario, scenario.policy(), **scenario.settings) as trainer:
            run_to_end(trainer, None)
    finally:
        logger.removeHandler(handler)
    return "\n".join(records)


def test_a_trainer_says_so_before_the_first_step(two_ranks: Pool) -> None:
    scenario = stream(Shape(2, 1), "vertical_sync", settings={"pipeline_length": 2})
    texts = two_ranks.run(warned, scenario)
    assert any("the optimizer's momentum is 0.9" in text for text in texts)

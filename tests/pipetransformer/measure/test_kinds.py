"""Prove that sublayers which compute the same are found, and that a few are measured for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pipetransformer.measure import kinds as kinds_module
from pipetransformer.measure import measurements as measure_module
from pipetransformer.measure.kinds import few_of, given_to_all, kinds_of
from pipetransformer.measure.measurements import measure
from tests.costs import sublayer
from tests.models import Block
from tests.pipetransformer.measure.test_measurements import ALONE, make_task, read
from tests.pipetransformer.measure.test_stretches import spans_noted


def row(output_bytes: float = 8.0, saved_bytes: float = 64.0) -> dict[str, Any]:
    return {"output_bytes": output_bytes, "saved_bytes": saved_bytes}


def test_a_kind_is_a_look_of_modules_tensors_and_activations() -> None:
    fixed, other_eps, wide = Block(8, 0.0), Block(8, 0.0), Block(16, 0.0)
    fixed.inner.weight.requires_grad_(False)
    other_eps.norm.eps = 1e-3
    blocks = [Block(8, 0.0), Block(8, 0.0), fixed, other_eps, wide, Block(8, 0.1), Block(8, 0.0)]
    rows = [row() for _ in blocks]
    # The first takes the data set's entries, whatever they are.
    assert kinds_of(blocks, rows) == [0, 1, 2, 3, 4, 5, 1]
    # One that gives more than the others, and one that takes what it gave.
    rows[1] = row(output_bytes=16.0)
    assert kinds_of([blocks[0]] * 4, [row(), rows[1], row(), row()]) == [0, 1, 2, 3]
    assert kinds_of([blocks[0]] * 3, [row(), row(), row(saved_bytes=1.0)]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        # Embedding, twelve attentions and MLPs in turn, a head.
        ([0, *[1, 2] * 12, 3], (0, 1, 2, 3, 4, 25)),
        ([0, 1, 1, 1, 1, 2], (0, 1, 2, 5)),
        ([0, 1, 2, 3], (0, 1, 2, 3)),
        ([0], (0,)),
        # What stands above the fourth kind takes what only that gives.
        ([0, 1, 1, 1, 4, 1, 1, 1, 2, 3], (0, 1, 2, 4, 5, 6, 7, 8, 9)),
    ],
    ids=str,
)
def test_some_of_each_kind_make_a_chain(kinds: list[int], chosen: tuple[int, ...]) -> None:
    found = few_of(kinds, most=2)
    assert {kinds[index] for index in found} == set(kinds)
    for below, above in zip(found, found[1:], strict=False):
        assert kinds[below] == kinds[above - 1]
    assert found == chosen


def test_all_of_a_kind_get_the_median_of_those_measured_and_keep_their_own_bytes() -> None:
    everyone = [sublayer(layer, parameter_bytes=100 + layer) for layer in range(5)]
    chosen = (0, 1, 2, 4)
    measured = [
        sublayer(index, forward_s=s, spread=(1 - s / 20, 1.0 + s))
        for index, s in zip(chosen, (9, 1, 3, 7), strict=True)
    ]
    whole = given_to_all(measured, chosen, kinds=[0, 1, 1, 1, 2], everyone=everyone)
    assert [cost.forward_s for cost in whole] == [(9.0,), (2.0,), (2.0,), (2.0,), (7.0,)]
    assert [cost.spread[1] for cost in whole] == [10.0, 3.0, 3.0, 3.0, 8.0]
    assert [cost.name for cost in whole] == [cost.name for cost in everyone]
    assert [cost.parameter_bytes for cost in whole] == [100, 101, 102, 103, 104]


def test_a_slow_model_is_measured_by_some_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(global_batch_size=8)
    # However slow the machine is, no size is left out: a scalar's bytes are then as many a sample.
    monkeypatch.setattr(measure_module, "_BUDGET_S", 60.0)
    whole = measure(task, ALONE, read).profile
    monkeypatch.setattr(kinds_module, "_WHOLE_S", 0.0)
    before = {name: t.clone() for name, t in task.model.model.state_dict().items()}
    with spans_noted() as noted:
        found = measure(task, ALONE, read).profile
    assert (0, 1, 2, 5) in noted
    assert all(torch.equal(t, before[n]) for n, t in task.model.model.state_dict().items())
    blocks = found.sublayers[1:5]
    assert len({(cost.forward_s, cost.backward_s, cost.frozen_s) for cost in blocks}) == 1
    times = ("forward_s", "input_backward_s", "weight_backward_s", "frozen_s")
    for mine, theirs in zip(found.sublayers, whole.sublayers, strict=True):
        untimed = {name: getattr(theirs, name) for name in times}
        assert replace(mine, **untimed) == theirs
    assert isinstance(task.model.model, nn.Sequential)

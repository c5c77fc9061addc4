"""Prove that a model is measured in parts, to the same bytes, and equal sublayers once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from freeze import FreezeSchedule
from pipetransformer.feed.samples import Batch
from pipetransformer.measure import kinds, measurements
from pipetransformer.measure import kinds as kinds_module
from pipetransformer.measure import measurements as measure_module
from pipetransformer.measure import spans as measure_spans
from pipetransformer.measure.kinds import TimedSublayers, few_of, kinds_of
from pipetransformer.measure.measurements import measure
from pipetransformer.measure.spans import Need, cut_spans, forward, run_spans, sublayer_needs
from pipetransformer.model import Task
from pipetransformer.processes.world import connect
from tests.helpers.costs import sublayer
from tests.helpers.inspection import deployment_of, layered_of
from tests.helpers.models import Block, tiny_trainer
from tests.helpers.pool import Pool
from tests.helpers.tasks import ALONE, assert_untouched, disturbed_model, make_task, read, snapshot

CPU = torch.device("cpu")


@contextmanager
def spans_noted() -> Iterator[list[tuple[int, ...]]]:
    """Note which sublayers are lent together."""
    noted, lent = list[tuple[int, ...]](), measure_spans.held_on

    @contextmanager
    def noting(task: Task, device: torch.device, span: Sequence[int]) -> Iterator[None]:
        noted.append(tuple(span))
        with lent(task, device, span):
            yield

    measure_spans.held_on = noting
    try:
        yield noted
    finally:
        measure_spans.held_on = lent


def test_spans_are_the_fewest_that_fit() -> None:
    needs = [Need(10, 1.0), Need(10, 1.0), Need(50, 1.0), Need(5, 2.0), Need(5, 0.0)]
    assert cut_spans(needs, 5, 1000) == (range(5),)
    assert cut_spans(needs, 5, 1000, parts=2) == (range(0, 2), range(2, 5))
    assert cut_spans(needs, 5, 30) == (range(0, 2), range(2, 3), range(3, 5))
    assert cut_spans(needs, 5, 29) == (range(0, 1), range(1, 2), range(2, 3), range(3, 5))
    assert cut_spans(needs, 5, -1) == tuple(range(i, i + 1) for i in range(5))


def test_a_span_s_output_is_what_the_model_computes() -> None:
    task, batch = make_task(), read(torch.arange(6))
    whole = forward_of(task, [range(6)], batch)
    for spans in ([range(0, 2), range(2, 6)], [range(i, i + 1) for i in range(6)]):
        assert torch.equal(forward_of(task, spans, batch), whole)
    model, (x, y) = task.model.model, batch.values()
    assert float(whole) == pytest.approx(
        nn.functional.cross_entropy(model(x), y, reduction="sum").item()
    )


def forward_of(task: Task, spans: list[range], batch: Batch) -> torch.Tensor:
    """Return what the last span hands on: the loss."""
    return run_spans(
        task, CPU, spans, [batch], lambda subs, inputs: forward(subs, inputs[0]).detach()
    )[-1]


def test_needs_are_bytes_in_training() -> None:
    task = make_task()
    task.model.sublayers[1].module.requires_grad_(False)
    task = make_task(task.model.model)
    for index, need in enumerate(sublayer_needs(task, CPU, read(torch.arange(1)))):
        size = sum(t.nbytes for t in task.model.tensors(index).values())
        assert need.fixed_bytes == (size if index == 1 else 2 * size)
        assert need.sample_bytes >= 3 * (8 if index == 5 else 64)


def test_in_parts_the_same_bytes_are_found_and_every_time_is_measured() -> None:
    settings = {"global_batch_size": 8}
    whole = measure(make_task(**settings), ALONE, read)
    task = make_task(**settings, memory_limit_bytes=12_000)
    with spans_noted() as noted:
        parts = measure(task, ALONE, read)
    assert {len(span) for span in noted} >= {1, 2}
    assert max(len(span) for span in noted) < 6
    assert parts.batch_sizes == whole.batch_sizes
    for one, other in zip(parts.sublayers, whole.sublayers, strict=True):
        for name in (
            "name",
            "layer",
            "parameter_bytes",
            "gradient_bytes",
            "buffer_bytes",
            "output_bytes",
        ):
            assert getattr(one, name) == getattr(other, name)
        assert one.optimizer_bytes == pytest.approx(other.optimizer_bytes, rel=0.01)
        assert one.saved_bytes == pytest.approx(other.saved_bytes, rel=0.01)
        assert min(*one.forward_s, *one.backward_s, *one.frozen_s) > 0


def test_sizes_at_which_no_sublayer_fits_are_left_out() -> None:
    needs = sublayer_needs(make_task(), CPU, read(torch.arange(1)))
    limit = int(max(need.at(4) for need in needs)) + 1
    task = make_task(global_batch_size=16, memory_limit_bytes=limit)
    assert measure(task, ALONE, read).batch_sizes == (1, 4)
    # What training holds meanwhile is not there for measuring.
    assert measure(task, ALONE, read, held_bytes=limit).batch_sizes == (1,)


def test_measuring_in_parts_leaves_everything_as_it_was() -> None:
    model = disturbed_model()
    task, before = make_task(model, memory_limit_bytes=1), snapshot(model)
    with spans_noted() as noted:
        measure(task, ALONE, read)
    assert {len(span) for span in noted} == {1}
    assert_untouched(model, before)


def spans_of_two_ranks(batch_size: int) -> set[tuple[int, ...]]:
    """Measure on this world; return what was lent together."""
    # All sublayers are timed, and all work beside messages, however slow the machine is.
    no_limit = patch.object(kinds, "_WHOLE_S", math.inf)
    all_works = patch.object(measurements, "_WORK_S", math.inf)
    with spans_noted() as noted, no_limit, all_works:
        measure(make_task(global_batch_size=batch_size), connect("cpu", timeout_s=30.0), read)
    return {*noted}


def test_a_size_beyond_a_rank_s_share_is_measured_over_half_of_the_layers(two_ranks: Pool) -> None:
    whole, *halves = (0, 1, 2, 3, 4, 5), (0, 1, 2), (3, 4, 5)
    for spans in two_ranks.run(spans_of_two_ranks, 8):
        assert spans == {whole, *halves}
    # Of one sample, one rank has all.
    for spans in two_ranks.run(spans_of_two_ranks, 1):
        assert spans == {whole}


def present_while_measuring() -> tuple[list[int], int]:
    """Measure anew in the middle of a run; list how many foreign sublayers were there at once."""
    # Three of six sublayers fit, also in a transition; all six do not.
    with tiny_trainer(
        freeze=FreezeSchedule([0]),
        global_batch_size=8,
        pipeline_length=2,
        micro_batches=8,
        memory_limit_bytes=32_500,
    ) as trainer:
        trainer.step()
        model = layered_of(trainer)
        own = {i for i in range(6) if not any(t.is_meta for t in model.tensors(i).values())}
        with spans_noted() as noted:
            trainer.measure()
        trainer.step()
        return [len({*span} - own) for span in noted], deployment_of(trainer).held_bytes()


def test_measuring_anew_leaves_room_for_what_is_trained(two_ranks: Pool) -> None:
    for foreign, held_bytes in two_ranks.run(present_while_measuring):
        assert held_bytes > 10_000
        assert max(foreign) < 3  # The other rank has three.


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
    whole = TimedSublayers(everyone, [0, 1, 1, 1, 2], chosen).for_all(measured)
    assert [cost.forward_s for cost in whole] == [(9.0,), (2.0,), (2.0,), (2.0,), (7.0,)]
    assert [cost.spread[1] for cost in whole] == [10.0, 3.0, 3.0, 3.0, 8.0]
    assert [cost.name for cost in whole] == [cost.name for cost in everyone]
    assert [cost.parameter_bytes for cost in whole] == [100, 101, 102, 103, 104]


def test_a_slow_model_is_measured_by_some_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(global_batch_size=8)
    # However slow the machine is, no size is left out: a scalar's bytes are then as many a sample.
    monkeypatch.setattr(measure_module, "_BUDGET_S", 60.0)
    whole = measure(task, ALONE, read)
    monkeypatch.setattr(kinds_module, "_WHOLE_S", 0.0)
    before = {name: t.clone() for name, t in task.model.model.state_dict().items()}
    with spans_noted() as noted:
        found = measure(task, ALONE, read)
    # Each by itself: a few activations live meanwhile, not those of all.
    assert {(0,), (1,), (2,), (5,)} <= {*noted}
    assert all(torch.equal(t, before[n]) for n, t in task.model.model.state_dict().items())
    blocks = found.sublayers[1:5]
    assert len({(cost.forward_s, cost.backward_s, cost.frozen_s) for cost in blocks}) == 1
    times = ("forward_s", "input_backward_s", "weight_backward_s", "frozen_s")
    for mine, theirs in zip(found.sublayers, whole.sublayers, strict=True):
        untimed = {name: getattr(theirs, name) for name in times}
        assert replace(mine, **untimed) == theirs
    assert isinstance(task.model.model, nn.Sequential)

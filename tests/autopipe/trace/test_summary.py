"""Prove that times, kept activations and traffic are counted, and equal their closed forms."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
import torch
from torch import Tensor, nn

from autopipe.gpipe.module import GPipe
from autopipe.schedule import SCHEDULES, Op, StageProgram, draw, forward_only
from autopipe.skip.skip_layers import pop, skippable, stash
from autopipe.trace.span import Span
from autopipe.trace.trace import Trace
from tests.helpers.pipes import (
    CASES,
    CHUNKS,
    SAMPLES,
    WIDTH,
    batch,
    model,
    recomputed,
    traced_step,
)


def test_a_forward_alone_keeps_nothing_and_is_drawn_alone() -> None:
    pipeline = model()
    with pipeline.trace() as trace, torch.no_grad():
        pipeline(batch()[0])
    assert trace.grid() == draw(forward_only((1, 1), CHUNKS))
    summary = trace.summary()
    assert summary.schedule == "forward only"
    for stage in summary.stages:
        assert stage.peak_in_flight == stage.peak_graphs == 0
    (link,) = summary.links
    assert link.activation_bytes == SAMPLES * WIDTH * 8
    assert link.gradient_bytes == 0


def peak_graphs(program: StageProgram, checkpointed: Collection[int]) -> int:
    """Count the most graphs alive at once: a checkpointed forward has none, its repetition has."""
    alive = peak = 0
    for ins in program:
        alive += ins.op is Op.RECOMPUTE
        alive += ins.op is Op.FORWARD and ins.micro_batch not in checkpointed
        alive -= ins.op is Op.BACKWARD
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize(("balance", "schedule", "checkpoint"), CASES)
def test_counted_peaks_equal_the_schedules_closed_forms(
    balance: tuple[int, ...], schedule: str, checkpoint: str
) -> None:
    """Each layer saves its input: of a graph a stage keeps one a layer, else its input alone."""
    one = SAMPLES // CHUNKS * WIDTH * 8
    summary = traced_step(balance, schedule, checkpoint).summary()
    num_stages = len(balance)
    written = SCHEDULES[schedule](num_stages, CHUNKS, recomputed=recomputed(checkpoint))
    for j, (stage, num_layers) in enumerate(zip(summary.stages, balance, strict=True)):
        in_flight = CHUNKS if schedule == "gpipe" else min(num_stages - j, CHUNKS)
        graphs = peak_graphs(written[j], recomputed(checkpoint))
        assert stage.peak_in_flight == in_flight
        assert stage.peak_graphs == graphs
        assert checkpoint != "always" or graphs == 1
        assert checkpoint != "never" or graphs == in_flight
        # The last stage's loss saves the difference.
        rest = num_layers - (j < num_stages - 1)
        assert stage.peak_bytes == (in_flight + graphs * rest) * one


def test_activations_are_counted_in_bytes_with_and_without_checkpointing() -> None:
    """Each of a stage's 2 layers saves its input: 3 samples of 8 doubles a micro-batch."""
    one = SAMPLES // CHUNKS * WIDTH * 8
    x, _ = batch()
    peaks = {}
    for checkpoint in ("never", "always"):
        pipeline = model((2, 2), checkpoint=checkpoint)
        with pipeline.trace() as trace:
            pipeline(x.requires_grad_()).sum().backward()
        peaks[checkpoint] = [stage.peak_bytes for stage in trace.summary().stages]
        # All graphs are gone, and so is the count.
        last = {span.stage: span for span in trace.spans if span.peer is None}
        assert [last[j].kept_bytes for j in (0, 1)] == [0, 0]
    assert peaks["never"] == [CHUNKS * 2 * one] * 2
    # The inputs of all micro-batches, and the other layer's input of one.
    assert peaks["always"] == [CHUNKS * one + one] * 2


def test_shared_memory_counts_once_and_parameters_do_not_count() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            hidden = x + 1.0
            # Saves hidden as it is, twice as views, and views of the weight.
            product = hidden.view(-1, WIDTH) @ self.weight.t() @ self.weight[:, :4]
            return product.sum() + hidden.square().sum() + x[:, :4].sum()

    pipeline = GPipe(nn.Sequential(Views()), [1], checkpoint="never")
    with pipeline.trace() as trace:
        pipeline(batch()[0]).backward()
    # hidden, and its product with the weight.
    assert trace.summary().stages[0].peak_bytes == 2 * SAMPLES * WIDTH * 8


@pytest.mark.parametrize("num_stages", [2, 4])
def test_bytes_sent_equal_the_formula_and_nothing_is_copied_on_one_device(num_stages: int) -> None:
    summary = traced_step((1,) * (num_stages - 1) + (5 - num_stages,), "1f1b", "never").summary()
    sent = sum(link.activation_bytes + link.gradient_bytes for link in summary.links)
    assert sent == (num_stages - 1) * 2 * SAMPLES * WIDTH * 8
    assert [link.copied_bytes for link in summary.links] == [0] * (num_stages - 1)


@skippable(stash=["skip"])
class Stasher(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("skip", x[:, :2] * 2)
        return x


@skippable(pop=["skip"])
class Popper(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        skip = yield pop("skip")
        return x + skip.sum(1, keepdim=True)


def test_a_skip_is_counted_on_the_link_it_takes() -> None:
    pipeline = GPipe(nn.Sequential(Stasher(), nn.Tanh(), Popper()), [1, 1, 1], chunks=CHUNKS)
    with pipeline.trace() as trace:
        pipeline(batch()[0].requires_grad_()).sum().backward()
    links = {(link.below, link.above): link for link in trace.summary().links}
    assert set(links) == {(0, 1), (1, 2), (0, 2)}
    assert links[0, 2].activation_bytes == links[0, 2].gradient_bytes == SAMPLES * 2 * 8
    assert links[0, 1].activation_bytes == SAMPLES * WIDTH * 8


@pytest.mark.parametrize(("balance", "schedule", "checkpoint"), CASES)
def test_bubble_and_utilisation_are_fractions(
    balance: tuple[int, ...], schedule: str, checkpoint: str
) -> None:
    summary = traced_step(balance, schedule, checkpoint).summary()
    num_stages = len(balance)
    assert 0.0 <= summary.bubble <= 1.0
    assert summary.formula_bubble == (num_stages - 1) / (CHUNKS + num_stages - 1)
    busy = [stage.busy_fraction for stage in summary.stages]
    assert all(0.0 < fraction <= 1.0 for fraction in busy)
    assert summary.bubble == pytest.approx(1.0 - sum(busy) / num_stages)


def test_the_bubble_of_a_perfect_step_is_the_formulas() -> None:
    """Forwards of 1 s and backwards of 2 s on 2 stages take 3 * (M + K - 1) s."""
    starts = {
        0: [("F", 0, 0), ("F", 1, 1), ("B", 1, 5), ("B", 0, 7)],
        1: [("F", 0, 1), ("F", 1, 2), ("B", 1, 3), ("B", 0, 5)],
    }
    spans = [
        Span(stage, Op.FORWARD if kind == "F" else Op.BACKWARD, i, start, start + length)
        for stage, tasks in starts.items()
        for kind, i, start in tasks
        for length in [1 if kind == "F" else 2]
    ]
    summary = Trace.of(spans).summary()
    assert summary.schedule == "gpipe"
    assert summary.step_s == 9
    assert summary.bubble == pytest.approx(1 / 3) == summary.formula_bubble


def test_the_summary_is_printed_as_tables() -> None:
    lines = str(traced_step((2, 2), "1f1b", "except_last").summary()).splitlines()
    assert lines[0] == "1f1b: 2 stages, 4 micro-batches (3 checkpointed)"
    assert lines[1].startswith("step ") and lines[1].endswith("20.0% by (K-1)/(M+K-1)")
    assert lines[3].split() == ["stage", "busy", "in", "flight", "graphs", "activations"]
    assert lines[4].split()[2:4] == ["2", "2"]
    assert lines[5].split()[2:4] == ["1", "1"]
    assert lines[-1].split() == ["all", *["768", "B"] * 2, "1.5", "KiB", "0", "B"]
    assert len({len(line) for line in lines[3:6]}) == 1

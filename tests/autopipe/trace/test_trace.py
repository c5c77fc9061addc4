"""Prove that a trace is drawn as what ran, in its order, in text, lanes and pictures."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from autopipe.gpipe.module import GPipe
from autopipe.schedule import SCHEDULES, Op, draw
from autopipe.trace.chrome import chrome_trace
from autopipe.trace.span import Span
from autopipe.trace.trace import Trace
from tests.helpers.pipes import CASES, CHUNKS, batch, model, recomputed, traced_step


@pytest.mark.parametrize(("balance", "schedule", "checkpoint"), CASES)
def test_the_grid_of_a_step_is_its_schedules(
    balance: tuple[int, ...], schedule: str, checkpoint: str
) -> None:
    trace = traced_step(balance, schedule, checkpoint)
    expected = SCHEDULES[schedule](len(balance), CHUNKS, recomputed=recomputed(checkpoint))
    assert trace.grid() == draw(expected)
    assert trace.summary().schedule == schedule


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_the_grid_of_a_forward_and_its_backward_is_gpipes(checkpoint: str) -> None:
    pipeline = model((1, 1, 2), checkpoint=checkpoint)
    x, y = batch()
    with pipeline.trace() as trace:
        nn.functional.l1_loss(pipeline(x), y).backward()
    assert trace.grid() == draw(SCHEDULES["gpipe"](3, CHUNKS, recomputed=recomputed(checkpoint)))


def test_an_empty_trace_has_an_empty_grid_and_no_summary() -> None:
    with model().trace() as trace:
        pass
    assert trace.grid() == ""
    with pytest.raises(ValueError, match="the trace is empty; run a forward or a step"):
        trace.summary()


def test_mini_batches_are_parted_by_a_bar_and_averaged() -> None:
    pipeline = model(checkpoint="never")
    with pipeline.trace() as trace:
        for _ in range(2):
            pipeline.step(*batch(), nn.functional.l1_loss)
    rows = draw(SCHEDULES["gpipe"](2, CHUNKS)).splitlines()
    cells = [row.removeprefix(f"stage {j}  ") for j, row in enumerate(rows)]
    assert trace.grid().splitlines() == [
        f"{row} | {cell}" for row, cell in zip(rows, cells, strict=True)
    ]
    both, first = trace.summary(), trace.steps[0].summary()
    assert both.num_steps == 2 and both.links == first.links
    assert both.stages[0].peak_bytes == first.stages[0].peak_bytes


def in_lanes(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    return lanes


def test_the_chrome_trace_has_named_lanes_in_which_nothing_overlaps(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    trace = traced_step((1, 1, 2), "1f1b", "except_last")
    trace.save_chrome(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    lanes = in_lanes(events)
    assert set(lanes) <= set(names)
    for members in lanes.values():
        members.sort(key=lambda event: event["ts"])
        assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in members)
        for before, after in pairwise(members):
            # Sums of float64 microseconds are exact to a picosecond here.
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    by_name = {(pid, names[pid, tid]): members for (pid, tid), members in lanes.items()}
    compute = [event["name"] for event in by_name[3, "compute"]]
    assert compute == [span.label for span in trace.spans if span.stage == 2 and span.is_compute]
    assert [event["name"] for event in by_name[1, "to stage 1"]] == ["a0", "a1", "a2", "a3"]
    assert [event["name"] for event in by_name[2, "to stage 0"]] == ["g0", "g1", "g2", "g3"]
    assert {name for pid, name in by_name if pid == 2} == {
        *("compute", "wait", "to stage 0", "to stage 2")
    }


def test_transfers_under_way_at_once_have_lanes_of_their_own() -> None:
    spans = [Span(0, Op.SEND_ACTIVATION, i, i, i + 1.5, 8, 8, peer=1) for i in range(3)]
    lanes = in_lanes(chrome_trace(Trace.of(spans).spans)["traceEvents"])
    assert [[event["name"] for event in lane] for lane in lanes.values()] == [["a0", "a2"], ["a1"]]


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("as asked for")


@pytest.mark.parametrize("position", [0, 2])
def test_spans_of_a_forward_that_fails_can_be_read(position: int) -> None:
    layers: list[nn.Module] = [nn.Tanh(), nn.Tanh(), nn.Tanh()]
    layers[position] = Failing()
    pipeline = GPipe(nn.Sequential(*layers), [1, 1, 1], chunks=CHUNKS)
    with pytest.raises(ArithmeticError, match="as asked for"), pipeline.trace() as trace:
        pipeline(batch()[0])
    ran = [span for span in trace.spans if span.is_compute]
    assert [s.label for s in ran if s.stage == position] == ["F0"]
    assert trace.grid().splitlines()[position].replace("..", "").split()[2:] == ["F0"]
    assert trace.summary().schedule == "another order"
    json.dumps(chrome_trace(trace.spans))

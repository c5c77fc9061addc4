"""Prove that recording changes nothing, costs nothing unasked, and tells a device's own times."""

from __future__ import annotations

import gc
import pickle
import time
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.engine.executor import StageRun
from autopipe.engine.links import Payload
from autopipe.gpipe.module import GPipe
from autopipe.schedule import SCHEDULES, Instruction, Op, draw
from autopipe.threads.thread_link import Crossing
from autopipe.trace.recorder import Recorder
from autopipe.trace.span import Span
from autopipe.trace.trace import Trace
from tests.helpers.pipes import CHUNKS, SAMPLES, WIDTH, batch, model, recomputed
from tests.helpers.pool import Pool
from tests.helpers.stages import StackWork, connect, layers_of, place, stage_model


def test_a_copy_is_noted_with_its_bytes_and_where_it_goes() -> None:
    sender, receiver = Recorder(0), Recorder(2)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    up = Crossing(Op.SEND_ACTIVATION, cpu, meta, recorders=(sender, receiver))
    up.send(3, Payload((torch.zeros(5, 2), None)))
    (span,) = sender.spans
    assert (span.stage, span.peer, span.op, span.micro_batch) == (0, 2, Op.SEND_ACTIVATION, 3)
    assert span.num_bytes == span.payload_bytes == 40
    down = Crossing(Op.SEND_GRADIENT, cpu, meta, recorders=(receiver, sender))
    down.send(3, Payload((torch.zeros(4), None)))
    (span,) = receiver.spans
    assert (span.stage, span.peer, span.op, span.num_bytes) == (2, 0, Op.SEND_GRADIENT, 16)


def test_nothing_is_recorded_when_no_trace_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = model()
    with pipeline.trace() as trace:
        pipeline.step(*batch(), nn.functional.l1_loss)
    before = trace.spans

    def refuse(self: Recorder, stage: int, **options: object) -> None:
        raise AssertionError("a recorder without a trace")

    monkeypatch.setattr(Recorder, "__init__", refuse)
    pipeline.step(*batch(), nn.functional.l1_loss)
    pipeline(batch()[0]).sum().backward()
    assert trace.spans == before


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_tracing_changes_no_gradient_and_keeps_no_tensor_alive(checkpoint: str) -> None:
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    )
    pipeline = GPipe(layers, [2, 2], chunks=CHUNKS, checkpoint=checkpoint)
    x = torch.rand(SAMPLES, WIDTH)
    gradients, alive = [], []
    layers[2].register_forward_hook(lambda *args: alive.append(weakref.ref(args[2])))
    for is_traced in (False, True):
        pipeline.zero_grad()
        if is_traced:
            with pipeline.trace() as trace:
                pipeline(x).square().sum().backward()
        else:
            pipeline(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in pipeline.parameters() if p.grad is not None])
    for untraced, traced in zip(*gradients, strict=True):
        assert torch.equal(untraced, traced)
    gc.collect()
    assert alive and not any(tensor() is not None for tensor in alive)
    assert trace.spans


def test_a_trace_does_not_hide_that_a_saved_tensor_was_changed() -> None:
    class Spoiler(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x.exp()
            output = hidden * 2
            hidden.add_(1)
            return output

    pipeline = GPipe(nn.Sequential(Spoiler()), [1], checkpoint="never")
    with pipeline.trace():
        output = pipeline(batch()[0].requires_grad_())
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            output.sum().backward()


def test_a_retained_graph_is_kept_until_its_last_backward() -> None:
    pipeline = model((2, 2), checkpoint="never")
    with pipeline.trace() as trace:
        loss = pipeline(batch()[0]).sum()
        loss.backward(retain_graph=True)
        kept = [span.kept_bytes for span in trace.spans if span.op is Op.BACKWARD]
        loss.backward()
    assert min(kept) == max(kept) > 0
    assert trace.spans[-1].kept_bytes == 0


def traced_stage(step: int, checkpoint: str) -> list[Span]:
    """Run a stage of a pipeline of processes; return what its recorder noted."""
    stage, length, group = place()
    work = StackWork(layers_of(stage_model(), stage, length), (3, 3, 3, 3))
    program = SCHEDULES["1f1b"](length, CHUNKS, recomputed=recomputed(checkpoint))[stage]
    recorder = Recorder(stage, step=step)
    StageRun(program, work, connect(group), (3, 3, 3, 3), recorder=recorder).run()
    return recorder.spans


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_traces_of_processes_are_put_together(two_ranks: Pool, checkpoint: str) -> None:
    spans = [
        span
        for step in range(2)
        for stage in two_ranks.run(traced_stage, step, checkpoint)
        for span in stage
    ]
    trace = Trace.of(pickle.loads(pickle.dumps(spans)))
    schedule = draw(SCHEDULES["1f1b"](2, CHUNKS, recomputed=recomputed(checkpoint)))
    assert [step.grid() for step in trace.steps] == [schedule, schedule]
    # What a stage received, its neighbour had sent: they share a clock.
    sent = {(s.step, s.micro_batch): s for s in trace.spans if s.peer == 1}
    for span in trace.spans:
        if span.op is Op.RECV_ACTIVATION:
            assert sent[span.step, span.micro_batch].start_s <= span.end_s
    summary = trace.summary()
    (link,) = summary.links
    # 12 samples of 8 float64, which cross between the processes' memories.
    assert link.activation_bytes == link.gradient_bytes == 12 * 8 * 8
    assert link.copied_bytes == 2 * 12 * 8 * 8
    assert [stage.peak_in_flight for stage in summary.stages] == [2, 1]


class FakeDevice:
    """Stand in for torch.cuda: a device whose streams take 2 ms between two events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms, self.num_waits = 500.0, 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                assert stream == "stream of cuda:0"
                device.now_ms += 2.0
                self.came_ms = device.now_ms

            def synchronize(self) -> None:
                device.num_waits += 1

            def elapsed_time(self, later: Any) -> float:
                return later.came_ms - self.came_ms

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")


def test_a_devices_events_are_read_only_with_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    before_s = time.perf_counter()
    trace = Trace()
    recorder = trace.recorder(0, device=torch.device("cuda:0"))
    after_s = time.perf_counter()
    waits_before = device.num_waits
    with recorder.span(Instruction(Op.FORWARD, 0)):
        recorder.starts_forward()
    with recorder.transfer(
        Instruction(Op.SEND_ACTIVATION, 0),
        peer=1, payload_bytes=12, copied_bytes=12, device=torch.device("cuda:0"),
    ):  # fmt: skip
        pass
    assert device.num_waits == waits_before
    forward, copy = trace.spans
    # The origin is followed by the mark of the start, which the wait for room replaces.
    assert before_s + 4e-3 <= forward.start_s <= after_s + 4e-3
    assert forward.duration_s == pytest.approx(2e-3)
    assert copy.start_s - forward.end_s == pytest.approx(2e-3)
    assert (copy.peer, copy.num_bytes, copy.payload_bytes) == (1, 12, 12)


@pytest.mark.cuda
def test_on_cuda_times_are_the_devices_and_copies_have_lanes() -> None:
    pipeline = model((2, 2), devices=["cuda:0", "cpu"], checkpoint="never")
    x = batch()[0].to("cuda:0")
    pipeline(x).sum().backward()
    with pipeline.trace() as trace:
        pipeline(x).sum().backward()
    assert trace.grid() == draw(SCHEDULES["gpipe"](2, CHUNKS))
    of_stage = [s for s in trace.spans if s.stage == 0 and s.peer is None]
    for before, after in pairwise(of_stage):
        assert before.end_s <= after.start_s
    ends = {(s.op, s.micro_batch): s.end_s for s in of_stage}
    for span in trace.spans:
        if span.peer == 1:
            # The copy is asked for after the forward, on a stream that waits for it.
            assert span.num_bytes == span.payload_bytes == SAMPLES // CHUNKS * WIDTH * 8
            assert ends[Op.FORWARD, span.micro_batch] <= span.start_s <= span.end_s
        elif span.peer == 0:
            # Who waits may go on just before the copy's end is noted: a launch apart.
            assert span.end_s <= ends[Op.RECV_GRADIENT, span.micro_batch] + 1e-4

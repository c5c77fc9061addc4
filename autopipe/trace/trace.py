"""Trace steps: when each stage ran which instruction, what it kept, and what was under way.

A trace is drawn as text as `autopipe.schedule.draw` does, one row a stage: each instruction is one
tick long. `Trace.save_chrome` writes what shows their times.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from autopipe.schedule import draw
from autopipe.trace.chrome import chrome_trace
from autopipe.trace.recorder import Clocks, Recorder
from autopipe.trace.span import Span, programs
from autopipe.trace.summary import Summary, summarize


class Trace:
    """Hold the spans of the steps that ran while it was open.

    Run a step before: a process's first step also pays for what torch sets up once. A trace keeps
    no tensor alive. On CUDA devices times are the device's, and reading them waits for it. Stages
    that share a stream count as busy with each other's work. On the CPU a stage whose thread waits
    for a core counts as busy: trace with no more stages than cores.

    Stages in processes have a `Recorder` each, for `StageRun`; `Trace.of` joins their spans.
    """

    def __init__(self) -> None:
        self._recorders: list[Recorder] = []
        self._num_steps = Counter[int]()
        self._spans: list[Span] = []
        self._clocks = Clocks()

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Trace:
        """Join the spans of stages, also of stages in several processes of one machine."""
        trace = cls()
        trace._spans = list(spans)
        return trace

    def recorder(self, stage: int, *, device: torch.device | None = None) -> Recorder:
        """Return a new recorder for a stage's next mini-batch; its spans become the trace's."""
        recorder = Recorder(stage, step=self._num_steps[stage], device=device, clocks=self._clocks)
        # Each stage has a recorder for each mini-batch, so counting its own numbers the steps.
        self._num_steps[stage] += 1
        self._recorders.append(recorder)
        return recorder

    @property
    def spans(self) -> list[Span]:
        """Return all spans, by stage and start."""
        recorded = [span for recorder in self._recorders for span in recorder.spans]
        return sorted(self._spans + recorded, key=lambda span: (span.stage, span.start_s))

    @property
    def steps(self) -> list[Trace]:
        spans = self.spans
        return [
            Trace.of(span for span in spans if span.step == step)
            for step in sorted({span.step for span in spans})
        ]

    def grid(self) -> str:
        """Draw the order of what the stages computed, with a bar between mini-batches."""
        ran = [programs(step.spans) for step in self.steps]
        num_stages = 1 + max((max(step) for step in ran), default=-1)
        return draw(*(tuple(step.get(j, ()) for j in range(num_stages)) for step in ran))

    def summary(self) -> Summary:
        """Sum up times, memory and traffic.

        Raises:
            ValueError: nothing was computed.
        """
        return summarize(self.spans)

    def save_chrome(self, path: str | Path) -> None:
        """Write a JSON file for ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(chrome_trace(self.spans)))

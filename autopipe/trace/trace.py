"""Trace steps: when each stage ran which instruction, what it kept, and what was under way.

A trace is drawn as text, one row a stage. Without a width, each instruction is one tick long, as
in `autopipe.schedule.draw`. With a width, columns are equal times; `=` continues an instruction,
`.` is idle:

    stage 0  F0====F1===.......B1======.B0====
    stage 1  ......F0===F1====B1=====B0=====..
             0 ms                      12.4 ms
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from autopipe.schedule import draw, named_rows
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
        # Each stage has a recorder for each mini-batch, so counting its own numbers the steps.
        step = sum(recorder.stage == stage for recorder in self._recorders)
        self._recorders.append(Recorder(stage, step=step, device=device, clocks=self._clocks))
        return self._recorders[-1]

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

    def grid(self, width: int | None = None) -> str:
        """Draw what the stages computed, one row a stage.

        Args:
            width: columns over which to spread the time. None draws the order alone, one tick an
                instruction, with a bar between mini-batches.
        """
        if width is not None:
            return _time_grid(self.spans, width)
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


def _time_grid(spans: Sequence[Span], width: int) -> str:
    """Draw the spans that compute over `width` columns of time, with a scale below."""
    if width < 1:
        raise ValueError(f"a grid of {width} columns cannot be drawn; give at least 1")
    if not spans:
        return ""
    start_s = min(span.start_s for span in spans)
    total_s = max(max(span.end_s for span in spans) - start_s, 1e-12)
    rows: dict[int, list[str]] = {stage: ["."] * width for stage in programs(spans)}
    for span in sorted((s for s in spans if s.is_compute), key=lambda s: s.start_s):
        # However short, a span gets one column, also at the right edge.
        first = min(width - 1, round((span.start_s - start_s) / total_s * width))
        last = min(width, max(first + 1, round((span.end_s - start_s) / total_s * width)))
        rows[span.stage][first:last] = span.label.ljust(last - first, "=")[: last - first]
    scale = f"{total_s * 1e3:.1f} ms".rjust(max(0, width - 4))
    margin = " " * len(f"stage {max(rows)}  ")
    grid = named_rows({f"stage {stage}": "".join(row) for stage, row in rows.items()})
    return f"{grid}\n{margin}0 ms{scale}"

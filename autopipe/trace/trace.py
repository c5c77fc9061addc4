"""Trace steps: when each stage ran which instruction, what it kept, and what was under way."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from autopipe.trace.chrome import chrome_trace
from autopipe.trace.grid import instruction_grid, time_grid
from autopipe.trace.picture import save_picture
from autopipe.trace.recorder import Clocks, Recorder
from autopipe.trace.span import Span
from autopipe.trace.summary import Summary, summarize


class Trace:
    """Hold the spans of the steps that ran while it was open.

    Run a step before: the first one of a process also pays for what torch sets up once. A trace
    keeps no tensor alive. On CUDA devices all times are the device's, and reading them waits
    for it; stages that share a stream there are busy with each other's work, too. On the CPU a
    stage whose thread waits for a core is busy: trace with no more stages than cores.

    Stages in processes have a `Recorder` each, for `run_program`; `Trace.of` takes all their
    spans.
    """

    def __init__(self) -> None:
        self._recorders: list[Recorder] = []
        self._spans: list[Span] = []
        self._clocks = Clocks()

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Trace:
        """Put spans together, of stages that may have run in several processes of one machine."""
        trace = cls()
        trace._spans = list(spans)
        return trace

    def recorder(self, stage: int, *, device: torch.device | None = None) -> Recorder:
        """Return a new recorder, for a stage's next mini-batch, whose spans belong here."""
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
        """Return a trace for each mini-batch."""
        spans = self.spans
        return [
            Trace.of(span for span in spans if span.step == step)
            for step in sorted({span.step for span in spans})
        ]

    def grid(self, width: int | None = None) -> str:
        """Draw what the stages computed, one row a stage.

        Args:
            width: columns over which to spread the time. None draws the order alone, one tick an
                instruction as `autopipe.schedule.draw` does, and parts mini-batches by a bar.
        """
        if width is not None:
            return time_grid(self.spans, width)
        return instruction_grid([step.spans for step in self.steps])

    def summary(self) -> Summary:
        """Sum up times, memory and traffic.

        Raises:
            ValueError: nothing was computed.
        """
        return summarize(self.spans)

    def chrome(self) -> dict[str, object]:
        """Return the trace in the Trace Event Format."""
        return chrome_trace(self.spans)

    def save_chrome(self, path: str | Path) -> None:
        """Write a file for ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(self.chrome()))

    def save_picture(self, path: str | Path) -> None:
        """Draw the stages over time; the path's ending tells the format, such as .png or .svg.

        Raises:
            ValueError: nothing was computed.
        """
        save_picture(self.spans, path)

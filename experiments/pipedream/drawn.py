"""Draw the schedules side by side, with their bubble, memory and communication.

Simulated where a forward takes a second, a backward two and a message nothing; measured on threads
of this machine, a Transformer's blocks shared out evenly. Legend of the formulas: K stages, M
micro-batches a batch, N batches; stage 0 is where most is kept.

    schedule              idle                   micro-batches kept    weights kept
    model parallel        (K-1) / K              1 (the batch)         1
    GPipe                 (K-1) / (M+K-1)        M                     1
    1F1B                  (K-1) / (M+K-1)        min(K, M)             1
    async 1F1B            (K-1) / (N M+K-1)      min(K, N M)           1 + ceil((K-1) / M)
    replicated 1F1B       (by simulation)        warm-up + 1           1

Each boundary carries an activation up and its gradient down for every micro-batch, whatever the
schedule.

Source: Narayanan et al. 2019 and 2021; Huang et al. 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from autopipe import GPipe, StashedPipeline
from autopipe.plan import Simulation, StageTimes, simulate
from autopipe.schedule import (
    Op,
    Schedule,
    StageWorkers,
    gpipe,
    one_f_one_b,
    peak_in_flight,
    replicated_one_f_one_b,
    unflushed,
)
from autopipe.trace import Summary, as_bytes
from experiments.figures import new_figure
from experiments.finetune.series import markdown
from experiments.pipedream.networks import loss_fn, transformer

_BATCHES, _BLOCKS = 3, 2
"""Batches that are drawn and run; blocks of a measured stage."""
_SHADES = {Op.FORWARD: ("#3b6fb6", "#6d97cf"), Op.BACKWARD: ("#3f9d6b", "#74bd97")}
"""By turns, for batches that follow each other."""


@dataclass(frozen=True)
class TracedSchedule:
    """Hold what a trace tells of a schedule.

    Args:
        bubble: part of the stages' time in which they did not compute.
        kept: micro-batches that stage 0 had a graph of, at most.
        kept_bytes: of their activations.
        sent: bytes over the first boundary, over what the formula says.
        versions: of stage 0's weights.
    """

    bubble: float
    kept: int
    kept_bytes: int
    sent: float
    versions: int = 1


@dataclass(frozen=True)
class Drawn:
    """Hold a schedule of several batches, and what the formulas say of it.

    Args:
        schedules: one after the other; with flushes a batch's each.
        replicas: workers of each stage.
        num_micro_batches: of each schedule.
        share: of a batch that a micro-batch has.
        idle: by formula; None where there is none.
        kept, versions: by formula, at stage 0.
    """

    schedules: tuple[Schedule, ...]
    replicas: tuple[int, ...]
    num_micro_batches: int
    share: float
    idle: float | None
    kept: int
    versions: int

    def simulate(self) -> list[Simulation]:
        """Execute the schedules on a clock, a batch's forward taking as many seconds as M."""
        workers, row = StageWorkers(self.replicas), (self.share,) * self.num_micro_batches
        # What several workers share takes one of them as much longer.
        forward = [tuple(count * one for one in row) for count in self.replicas]
        times = StageTimes(
            tuple(forward),
            tuple(tuple(2 * one for one in own) for own in forward),
            ((0.0,) * self.num_micro_batches,) * (len(self.replicas) - 1),
        )
        return [
            simulate(schedule, times, replicas=workers.replicas) for schedule in self.schedules
        ]


def all_drawn(k: int, m: int) -> dict[str, Drawn]:
    """Return the schedules by name, of k stages and m micro-batches a batch."""
    ones = (1,) * k
    flushed = (k - 1) / (m + k - 1)
    replicated = (2,) + (1,) * (k - 1)
    stream = unflushed(k, _BATCHES, m)
    return {
        "model parallel": Drawn((gpipe(k, 1),) * _BATCHES, ones, 1, m, (k - 1) / k, 1, 1),
        "GPipe": Drawn((gpipe(k, m),) * _BATCHES, ones, m, 1.0, flushed, m, 1),
        "1F1B": Drawn((one_f_one_b(k, m),) * _BATCHES, ones, m, 1.0, flushed, min(k, m), 1),
        "async 1F1B": Drawn(
            (stream,),
            ones,
            m * _BATCHES,
            1.0,
            (k - 1) / (_BATCHES * m + k - 1),
            min(k, m * _BATCHES),
            1 + -(-(k - 1) // m),
        ),
        "replicated 1F1B": Drawn(
            (replicated_one_f_one_b(replicated, m),) * _BATCHES,
            replicated,
            m,
            1.0,
            None,
            min(StageWorkers(replicated).warm_up(0) + 1, -(-m // 2)),
            1,
        ),
    }


def measure(k: int, m: int, *, small: bool = False) -> dict[str, TracedSchedule]:
    """Run what threads can on this machine, k stages and m micro-batches; read its traces."""
    torch.manual_seed(0)
    images, labels = torch.randn(64, 1, 32, 32), torch.randint(10, (64,))
    width = 16 if small else 64
    make = partial(transformer, width, _BLOCKS * k)
    balance = [_BLOCKS] * k
    balance[0] += 1  # The patches,
    balance[-1] += 3  # and what follows the blocks.
    devices, boundary_bytes = ["cpu"] * k, len(images) * 64 * width * 4
    found = {}
    for name, schedule, chunks in (
        ("model parallel", "gpipe", 1),
        ("GPipe", "gpipe", m),
        ("1F1B", "1f1b", m),
    ):
        module = GPipe(make(), balance, devices=devices, chunks=chunks, checkpoint="never")
        for _ in range(_BATCHES):  # The last is traced.
            with module.trace() as trace:
                module.step(images, labels, loss_fn, schedule=schedule)
        found[name] = _measured(trace.summary(), 1, boundary_bytes)
    sgd = partial(torch.optim.SGD, lr=1e-3)
    stashed = StashedPipeline(make(), balance, optimizer=sgd, devices=devices, chunks=m)
    for _ in range(2):
        with stashed.trace() as trace:
            stashed.train_on([(images, labels)] * _BATCHES, loss_fn)
    found["async 1F1B"] = replace(
        _measured(trace.summary(), _BATCHES, boundary_bytes), versions=stashed.peak_versions[0]
    )
    return found


def _measured(summary: Summary, num_batches: int, boundary_bytes: int) -> TracedSchedule:
    stage, link = summary.stages[0], summary.links[0]
    sent = (link.activation_bytes + link.gradient_bytes) / num_batches
    return TracedSchedule(
        summary.bubble, stage.peak_graphs, stage.peak_bytes, sent / (2 * boundary_bytes)
    )


def table(drawn: Mapping[str, Drawn], measured: Mapping[str, TracedSchedule]) -> str:
    """Return a markdown table: formulas, simulation, and measurements where there are any.

    What is sent is that of a boundary and a batch, over an activation and its gradient.
    """
    head = ["schedule", "idle: formula", "simulated", "measured"]
    head += ["kept: formula", "simulated", "measured", "activations kept"]
    rows = [[*head, "weights: formula", "measured", "sent / formula"]]
    for name, one in drawn.items():
        parts = one.simulate()
        busy = sum(sum(part.busy_s) for part in parts)
        idle = sum(sum(part.idle_s) for part in parts)
        kept = max(peak_in_flight(schedule[0]) for schedule in one.schedules)
        seen = measured.get(name)
        rows.append(
            [
                name,
                "" if one.idle is None else f"{one.idle:.3f}",
                f"{idle / (busy + idle):.3f}",
                "" if seen is None else f"{seen.bubble:.3f}",
                str(one.kept),
                str(kept),
                "" if seen is None else str(seen.kept),
                "" if seen is None else as_bytes(seen.kept_bytes),
                str(one.versions),
                "" if seen is None else str(seen.versions),
                "" if seen is None else f"{seen.sent:.2f}",
            ]
        )
    return markdown(rows)


def draw(drawn: Mapping[str, Drawn], path: Path) -> None:
    """Draw all schedules over one time, a row a worker; numbers are micro-batches."""
    heights = [sum(one.replicas) for one in drawn.values()]
    figure = new_figure(14, 0.36 * sum(heights) + 0.6 * len(heights))
    all_axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axes, (name, one) in zip(all_axes, drawn.items(), strict=True):
        start_s, a_batch = 0.0, one.num_micro_batches * len(one.schedules) // _BATCHES
        for batch, simulation in enumerate(one.simulate()):
            for span in simulation.timeline:
                if span.op is Op.UPDATE:
                    continue
                which = batch + span.micro_batch // a_batch
                shade = _SHADES[span.op][which % 2]
                length = span.duration_s
                axes.barh(
                    span.stage, length, left=start_s + span.start_s, color=shade,
                    edgecolor="white", height=0.9,
                )  # fmt: skip
                axes.text(
                    start_s + span.start_s + length / 2, span.stage, str(span.micro_batch),
                    ha="center", va="center", color="white", fontsize=7,
                )  # fmt: skip
            start_s += simulation.step_s
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_yticks(range(sum(one.replicas)), StageWorkers(one.replicas).names(), fontsize=7)
        axes.invert_yaxis()
        axes.spines[["top", "right", "left"]].set_visible(False)
    all_axes[-1].set_xlabel("forwards of a micro-batch; blue runs forward, green backward")
    figure.savefig(path)

"""Count the bytes of activations that a stage keeps, while they are kept.

Sum up a trace: times, kept activations and traffic.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopipe.schedule import LETTERS, SCHEDULES, Op, StageProgram, forward_only, unflushed
from autopipe.trace.span import Span, programs
from autopipe.trace.text_tables import as_bytes, text_table


class _View(NamedTuple):
    """Name a part of a storage, by addresses; views of the same part are the same memory."""

    storage: int
    start: int
    num_bytes: int


@dataclass
class _Storage:
    """Count the holders of a storage's parts, which may overlap."""

    total_bytes: int
    holders: Counter[_View] = field(default_factory=Counter)

    def num_bytes(self) -> int:
        return min(self.total_bytes, sum(view.num_bytes for view in self.holders))


class KeptMemory:
    """Count the activations of one stage that graphs saved or that wait as inputs.

    Each memory counts once, however many graphs and views hold it. Parameters and their views
    do not count: they are there anyway. Not seen are tensors that a layer keeps in its own
    saved-tensor hooks, or in an autograd.Function without `save_for_backward`.

    Attributes:
        peak_bytes: the most kept since it was last set.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._num_bytes = 0
        self._storages: dict[int, _Storage] = {}
        self._inputs: list[_View] = []
        # A graph may be freed by any thread, and amid a count: what it lets go of waits here.
        self._released: deque[_View] = deque()

    @property
    def num_bytes(self) -> int:
        while self._released:
            self._let_go(self._released.popleft())
        return self._num_bytes

    def counting(self) -> AbstractContextManager[Any]:
        """Count what graphs built inside save, until they let go of it."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def set_inputs(self, tensors: Sequence[Tensor | None]) -> None:
        """Count these tensors, too, until the next call; they are not kept from being freed."""
        self._released.extend(self._inputs)
        self._inputs = [self._keep(tensor) for tensor in tensors if tensor is not None]

    def _pack(self, tensor: Tensor) -> _Saved:
        # Detached, because a graph must not hold its own output.
        saved = _Saved(tensor.detach(), tensor._version)
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, nn.Parameter):
            weakref.finalize(saved, self._released.append, self._keep(tensor))
        return saved

    def _keep(self, tensor: Tensor) -> _View:
        if tensor.layout is torch.strided:
            whole = tensor.untyped_storage()
            view = _View(whole.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            total_bytes = whole.nbytes()
        else:
            # Other layouts have several storages; the tensor stands for them.
            view, total_bytes = _View(id(tensor), 0, tensor.nbytes), tensor.nbytes
        kept_bytes = self.num_bytes
        storage = self._storages.setdefault(view.storage, _Storage(total_bytes))
        before = storage.num_bytes()
        storage.holders[view] += 1
        self._num_bytes = kept_bytes + storage.num_bytes() - before
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        return view

    def _let_go(self, view: _View) -> None:
        storage = self._storages[view.storage]
        before = storage.num_bytes()
        storage.holders[view] -= 1
        if not storage.holders[view]:
            del storage.holders[view]
        self._num_bytes += storage.num_bytes() - before
        if not storage.holders:
            del self._storages[view.storage]


@dataclass(eq=False)
class _Saved:
    """Hold a saved tensor in a graph; its end tells that the graph let go of it."""

    tensor: Tensor
    version: int


def _unpack(saved: _Saved) -> Tensor:
    # torch leaves this check to the hooks where there are any.
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {tuple(saved.tensor.shape)} tensor is at version "
            f"{saved.tensor._version}; expected version {saved.version}"
        )
    return saved.tensor


@dataclass(frozen=True)
class StageSummary:
    """Sum up one stage: in which part of the steps' time it computed, and the most it kept.

    That is micro-batches of which it kept anything, or a graph, and bytes of activations.
    """

    stage: int
    busy_fraction: float
    peak_in_flight: int
    peak_graphs: int
    peak_bytes: int


@dataclass(frozen=True)
class LinkSummary:
    """Sum up what crossed between two stages in a step, on average; skips pass by neighbours.

    Of activations (up) and gradients (down) what is not copied was handed over in shared memory.
    """

    below: int
    above: int
    activation_bytes: float
    gradient_bytes: float
    copied_bytes: float


@dataclass(frozen=True)
class Summary:
    """Sum up a trace; `str` gives tables.

    Args:
        schedule: a name of `SCHEDULES`, "forward only", or "another order", as of a step that
            failed.
        step_s: mean time from a step's first span to its last; between a forward and a backward
            of its own the caller's work counts.
        bubble: part of the stages' time in which they did not compute.
        formula_bubble: (K-1) / (M+K-1) of K stages and M micro-batches: the same if all forwards
            took one time, and all backwards (Huang et al., GPipe, 2019).
        stages, links: from the first stage on.
    """

    schedule: str
    num_stages: int
    num_micro_batches: int
    num_checkpointed: int
    num_steps: int
    step_s: float
    bubble: float
    formula_bubble: float
    stages: tuple[StageSummary, ...]
    links: tuple[LinkSummary, ...]

    @property
    def title(self) -> str:
        checkpointed = f" ({self.num_checkpointed} checkpointed)" if self.num_checkpointed else ""
        steps = "" if self.num_steps == 1 else f", mean of {self.num_steps} steps"
        return (
            f"{self.schedule}: {self.num_stages} stage{'s' if self.num_stages != 1 else ''}, "
            f"{self.num_micro_batches} micro-batch{'es' if self.num_micro_batches != 1 else ''}"
            f"{checkpointed}{steps}"
        )

    @property
    def times(self) -> str:
        return (
            f"step {self.step_s * 1e3:.2f} ms, bubble {self.bubble:.1%} measured, "
            f"{self.formula_bubble:.1%} by (K-1)/(M+K-1)"
        )

    def __str__(self) -> str:
        stages = [("stage", "busy", "in flight", "graphs", "activations")]
        for s in self.stages:
            busy, kept = f"{s.busy_fraction:.1%}", as_bytes(s.peak_bytes)
            stages.append((str(s.stage), busy, str(s.peak_in_flight), str(s.peak_graphs), kept))
        tables = [f"{self.title}\n{self.times}", text_table(stages)]
        if self.links:
            tables.append(text_table(self._link_rows()))
        return "\n\n".join(tables)

    def _link_rows(self) -> list[tuple[str, ...]]:
        rows: dict[str, tuple[float, ...]] = {}
        for link in self.links:
            up, down = link.activation_bytes, link.gradient_bytes
            rows[f"{link.below}-{link.above}"] = (up, down, up + down, link.copied_bytes)
        rows["all"] = tuple(map(sum, zip(*rows.values(), strict=True)))
        columns = ("link", "activations", "gradients", "sent a step", "copied")
        return [columns, *((name, *map(as_bytes, values)) for name, values in rows.items())]


def summarize(spans: Sequence[Span]) -> Summary:
    compute = [span for span in spans if span.is_compute]
    if not compute:
        raise ValueError("the trace is empty; run a forward or a step in its block")
    steps = [[span for span in spans if span.step == n] for n in sorted({s.step for s in compute})]
    total_s = sum(max(s.end_s for s in step) - min(s.start_s for s in step) for step in steps)
    ran = programs(steps[0])
    num_stages = max(ran) + 1
    num_micro_batches = len({span.micro_batch for span in steps[0]})
    recomputed = {s.micro_batch for s in steps[0] if s.op is Op.RECOMPUTE}
    stages = tuple(_stage([s for s in spans if s.stage == j], total_s) for j in ran)
    return Summary(
        _recognize(ran, num_micro_batches, recomputed),
        num_stages, num_micro_batches, len(recomputed), len(steps),
        step_s=total_s / len(steps),
        bubble=1.0 - sum(stage.busy_fraction for stage in stages) / len(stages),
        formula_bubble=(num_stages - 1) / (num_micro_batches + num_stages - 1),
        stages=stages,
        links=_links(spans, len(steps)),
    )  # fmt: skip


def _recognize(ran: dict[int, StageProgram], num_micro_batches: int, recomputed: set[int]) -> str:
    """Name the schedule that orders instructions as they were measured."""
    size = (max(ran) + 1, num_micro_batches)
    known = {name: make(*size, recomputed=recomputed) for name, make in SCHEDULES.items()}
    known["forward only"] = forward_only((1,) * size[0], num_micro_batches)
    if num_updates := sum(ins.op is Op.UPDATE for ins in ran[max(ran)]):
        batch = num_micro_batches // num_updates
        known["1f1b without flushes"] = unflushed(size[0], num_updates, batch)
    for name, schedule in known.items():
        if all(
            program == tuple(ins for ins in schedule[j] if ins.op in LETTERS)
            for j, program in ran.items()
        ):
            return name
    return "another order"


def _stage(spans: Sequence[Span], total_s: float) -> StageSummary:
    compute = [span for span in spans if span.is_compute]
    return StageSummary(
        spans[0].stage,
        busy_fraction=sum(span.duration_s for span in compute) / max(total_s, 1e-12),
        peak_in_flight=max((span.num_in_flight for span in compute), default=0),
        peak_graphs=max((span.num_graphs for span in compute), default=0),
        peak_bytes=max(span.peak_bytes for span in spans),
    )


def _links(spans: Sequence[Span], num_steps: int) -> tuple[LinkSummary, ...]:
    transfers = [(span, span.peer) for span in spans if span.peer is not None]
    links = []
    for ends in sorted({(min(s.stage, peer), max(s.stage, peer)) for s, peer in transfers}):
        crossing = [s for s, peer in transfers if {s.stage, peer} == set(ends)]
        up = sum(s.payload_bytes for s in crossing if s.op is Op.SEND_ACTIVATION)
        links.append(
            LinkSummary(
                *ends,
                activation_bytes=up / num_steps,
                gradient_bytes=(sum(s.payload_bytes for s in crossing) - up) / num_steps,
                copied_bytes=sum(s.num_bytes for s in crossing) / num_steps,
            )
        )
    return tuple(links)

"""Plan stages with their own numbers of replicas, as PipeDream does, for a place or a profile."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.cluster import parse_bytes
from autopipe.pipedream import (
    CutState,
    Machines,
    ReplicatedPlan,
    ReplicatedStage,
    cut_states,
    left_out,
    optimize,
    question_of,
    trimmed,
)
from autopipe.plan import PlanRequest
from autopipe.profile import LayerGraph, read_graph
from autopipe.trace import as_bytes, text_table
from pipetransformer.cli.places import Place

PIPEDREAM = "pipedream"
"""The planner's name on the command line."""

_MOST_MACHINES = 128
"""Of a level; the time to solve grows with their square."""


@dataclass(frozen=True)
class Replicated:
    """Hold PipeDream's choice.

    Args:
        states: the graph's cuts.
        levels: machines, innermost first.
        activations: whether their transfers count.
        memory_bytes: limit of a machine.
        minibatch: samples; None if the profile does not say.
    """

    graph: LayerGraph
    states: tuple[CutState, ...]
    levels: tuple[Machines, ...]
    activations: bool
    memory_bytes: float | None
    plan: ReplicatedPlan
    minibatch: float | None = None

    @property
    def samples_per_s(self) -> float:
        """Return the rate of a pipeline that is never flushed."""
        return (self.minibatch or 1.0) / self.plan.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "machines": [level.count for level in self.levels],
            "bandwidth": [level.bytes_per_s for level in self.levels],
            "num_states": len(self.states),
            "left_out": self.left_out,
            **self.plan.to_json(),
            "stage_nodes": [self._names(leaf) for leaf in self.plan.leaves],
        }

    @property
    def left_out(self) -> list[str]:
        """Name the nodes without an edge to the others, which no stage has."""
        return left_out(self.graph, self.states)

    def _names(self, stage: ReplicatedStage) -> list[str]:
        """Name the nodes of a stage, each behind its inputs."""
        held = stage.nodes(self.states)
        return [name for name in self.graph.in_order if name in held]

    def table(self) -> str:
        costs = {node.name: node for node in self.graph.nodes}
        rows = [["stage", "nodes", "replicas", "compute ms", "parameters"]]
        for number, leaf in enumerate(self.plan.leaves):
            names = self._names(leaf)
            seconds = sum(costs[name].compute_s for name in names)
            size = sum(costs[name].parameter_bytes for name in names)
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            row = [str(number), span, str(leaf.replicas), f"{1e3 * seconds:.4g}"]
            rows.append([*row, as_bytes(int(size))])
        return text_table(rows)


def replicate(place: Place, request: PlanRequest) -> Replicated:
    """Return PipeDream's choice for a place, as `question_of` asks for it.

    Raises:
        ValueError: no pipeline fits, or a level has too many machines.
    """
    asked = question_of(place.profile, request)
    limit, minibatch = request.memory_limit_bytes, float(asked.minibatch)
    return _solved(asked.graph, asked.levels, True, limit, minibatch)


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", type=Path, help="a graph.txt of PipeDream's profiler")
    parser.add_argument(
        "--machines", help="for --profile: machines of each level, innermost first: 4,4"
    )
    parser.add_argument(
        "--bandwidth", help="for --profile: bytes/s of each level, innermost first: 12e9,1.25e9"
    )
    parser.add_argument(
        "--activations", action="store_true", help="for --profile: count activations' transfers"
    )


def run_profile(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Plan for a profile in PipeDream's format, and print the plan.

    Raises:
        ValueError: options are missing or do not fit, or the file is no profile.
    """
    path: Path = options.profile
    if options.plan not in (None, PIPEDREAM):
        raise ValueError(f"--plan {options.plan} plans no --profile; give --plan {PIPEDREAM}")
    levels = _read_levels(options)
    limit = None if options.memory_limit is None else float(parse_bytes(options.memory_limit))
    try:
        graph = trimmed(read_graph(path.read_text()))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a profile: {error}") from error
    choice = _solved(graph, levels, options.activations, limit)
    if options.json:
        asked = {"profile": str(path), "activations": options.activations}
        say(json.dumps({**asked, **choice.to_json()}))
        return
    machines = " x ".join(str(level.count) for level in levels)
    if choice.left_out:
        say(
            f"left out, as nothing else has to do with them: {', '.join(choice.left_out)}; join "
            "them with edges if they belong to the model\n"
        )
    say(
        f"{path.name}: {len(graph.nodes)} nodes, {len(choice.states)} cuts; {machines} machines\n"
        f"choice: {choice.plan.name}, a minibatch every {1e3 * choice.plan.seconds:.4g} ms\n\n"
        f"{choice.table()}\n\n{_others(choice)}"
    )


def _solved(
    graph: LayerGraph,
    levels: Sequence[Machines],
    activations: bool,
    memory_bytes: float | None,
    minibatch: float | None = None,
) -> Replicated:
    if large := [level.count for level in levels if level.count > _MOST_MACHINES]:
        raise ValueError(f"a level has {large[0]} machines; at most {_MOST_MACHINES} are planned")
    states = cut_states(graph)
    plan = optimize(states, levels, activations=activations, memory_bytes=memory_bytes)
    return Replicated(graph, states, tuple(levels), activations, memory_bytes, plan, minibatch)


def _others(found: Replicated) -> str:
    """Compare a choice with plans that PipeDream would also consider."""
    plan = found.plan
    rows = [["", "ms a minibatch", "over data parallel"]]
    seconds: dict[str, float | None] = {plan.name: plan.seconds, "straight": None}
    with suppress(ValueError):  # No pipeline without replicas fits.
        seconds["straight"] = optimize(
            found.states,
            found.levels,
            activations=found.activations,
            memory_bytes=found.memory_bytes,
            straight=True,
        ).seconds
    seconds |= {"data parallel": plan.data_parallel_s, "one machine": plan.single_machine_s}
    for name, value in seconds.items():
        cells = ["none", ""]
        if value is not None:
            cells = [f"{1e3 * value:.4g}", f"{plan.data_parallel_s / value:.2f} x"]
        rows.append([name, *cells])
    return text_table(rows)


def _read_levels(options: argparse.Namespace) -> list[Machines]:
    for name in ("machines", "bandwidth"):
        if getattr(options, name) is None:
            example = "--machines 4,4 --bandwidth 12e9,1.25e9"
            raise ValueError(f"--profile needs --{name}, such as {example}")
    try:
        counts = [int(one) for one in options.machines.split(",")]
        rates = [float(one) for one in options.bandwidth.split(",")]
    except ValueError as error:
        raise ValueError(f"--machines and --bandwidth are lists of numbers ({error})") from error
    if len(counts) != len(rates):
        raise ValueError(
            f"--machines has {len(counts)} levels and --bandwidth {len(rates)}; give one rate for "
            "each level"
        )
    return [Machines(count, rate) for count, rate in zip(counts, rates, strict=True)]

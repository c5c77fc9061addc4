"""Write the answers of `pipetransformer plan` as text, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from textwrap import indent
from types import MappingProxyType
from typing import Any

from autopipe.plan import AS_FAST, ExplainedPlan, PipelinePlan, PlanRequest, Tables, table_text
from autopipe.trace import as_bytes, text_table
from pipetransformer.cli.plan_answer import Answer, Refusal
from pipetransformer.elastic import sureness

_PART_NAMES = {
    "compute_s": "compute",
    "recompute_s": "recompute",
    "bubble_s": "bubble",
    "transfer_s": "transfers",
    "all_reduce_s": "all-reduce",
    "update_s": "update",
    "overhead_s": "overhead",
    "reading_s": "reading",
}
_PLAN_COLUMNS = ("K", "R", "M", "schedule", "step ms", "samples/s")


def answers_text(
    model_name: str,
    answers: Sequence[Answer],
    *,
    num_samples: int | None,
    tables: Tables = MappingProxyType({}),
) -> str:
    """Write the answers for each number of frozen layers.

    Args:
        answers: of one place.
        num_samples: of the training set, for the size of a cache of all samples.
        tables: throughputs from which the published rules take M.
    """
    choices = _answer_text(answers[0]) if len(answers) == 1 else _frozen_text(answers)
    texts = [_place_text(model_name, answers[0]), choices, _cache_text(answers, num_samples)]
    return "\n\n".join(filter(None, [*texts, table_text(tables) if tables else ""]))


def answers_json(model_name: str, answers: Sequence[Answer], *, tables: Tables) -> dict[str, Any]:
    place, request = answers[0].place, answers[0].request
    return {
        "model": model_name,
        "assumed": list(place.assumed),
        "place": place.name,
        "num_slots": place.num_slots,
        "global_batch": request.global_batch,
        "answers": [_answer_json(answer) for answer in answers],
        "throughputs": tables,
    }


def _place_text(model_name: str, answer: Answer) -> str:
    place, costs = answer.place, answer.place.profile.sublayers
    batch = answer.request.global_batch
    memory = "" if place.memory_bytes is None else f" of {as_bytes(place.memory_bytes)}"
    held = sum(cost.parameter_bytes for cost in costs)
    trained = sum(cost.gradient_bytes for cost in costs)
    of_which = "" if trained == held else f", {as_bytes(trained)} of them trained"
    lines = [
        f"{model_name}: {len(costs)} sublayers, {as_bytes(held)} of parameters{of_which}",
        *(f"  assumed: {sentence}" for sentence in place.assumed),
        f"{place.name}: {place.num_slots} slots{memory}, {batch} samples a step",
    ]
    return "\n".join(lines)


def _answer_text(answer: Answer) -> str:
    chosen = answer.chosen
    if isinstance(chosen, Refusal):
        head = f"no plan: {chosen.reason}"
    else:
        stages = indent(text_table(_stage_rows(chosen, answer)), "  ")
        lines = [
            f"choice: {title(chosen, answer)}",
            parts_text(chosen),
            *_sureness(answer).split("; "),
        ]
        head = "\n  ".join(filter(None, lines)) + f"\n\n{stages}"
    text = f"{head}\n\nothers\n{indent(text_table(_other_rows(answer)), '  ')}"
    if isinstance(answer.published, Refusal):
        text += f"\n\npublished rules: {answer.published.reason}"
    return text


def _sureness(answer: Answer) -> str:
    chosen = answer.chosen
    if isinstance(chosen, Refusal) or answer.range_s is None:
        return ""
    near = answer.near if _is_nearest(chosen, answer) else ()
    return sureness(answer.range_s, near, chosen.plan)


def _is_nearest(chosen: ExplainedPlan, answer: Answer) -> bool:
    """Tell whether a choice is the fastest planner's, not that of other rules."""
    return chosen.plan == next(iter(answer.near), None)


def title(explained: ExplainedPlan, answer: Answer) -> str:
    """Name a plan, with its step's time."""
    plan, request = explained.plan, answer.request
    idle = request.num_ranks - request.ranks_of(plan.length)
    spares = f"; {idle} of {request.num_ranks} slots stay idle" if idle else ""
    return (
        f"K = {plan.length}, R = {_replicas_text(request, plan.length)}, "
        f"M = {plan.num_micro_batches}, {plan.manner}: step {_ms(plan.predicted_step_s)} ms, "
        f"{_rate(explained, answer)} samples/s{spares}"
    )


def _replicas_text(request: PlanRequest, length: int) -> str:
    """Return R, or the workers of each stage."""
    workers = request.workers_of(length)
    return "-".join(map(str, workers)) if max(workers) > 1 else str(request.replicas_of(length))


def parts_text(explained: ExplainedPlan) -> str:
    """List a step's parts as shares of it."""
    parts = asdict(explained.parts)
    return ", ".join(
        f"{name} {_share(explained, parts[key])}"
        for key, name in _PART_NAMES.items()
        if key not in ("reading_s", "recompute_s") or parts[key] > 0
    )


def _frozen_text(answers: Sequence[Answer]) -> str:
    """Write the choice at each number of frozen layers, beside those of other rules."""
    rows = [
        ["frozen", *_PLAN_COLUMNS, "bubble", "all-reduce", "largest stage"]
        + ["published K", *_PLAN_COLUMNS[1:], "takes", "PipeDream's", "samples/s"]
    ]
    for answer in answers:
        chosen, published = answer.chosen, answer.published
        largest = ["", "", ""]
        if not isinstance(chosen, Refusal):
            shares = (chosen.parts.bubble_s, chosen.parts.all_reduce_s)
            largest = [_share(chosen, part) for part in shares]
            largest.append(as_bytes(max(chosen.plan.peak_bytes)))
        takes = ""
        if not isinstance(chosen, Refusal) and not isinstance(published, Refusal):
            takes = f"{published.plan.predicted_step_s / chosen.plan.predicted_step_s:.2f} x"
        frozen = str(answer.request.num_frozen)
        plans = _plan_cells(chosen, answer), _plan_cells(published, answer)
        rows.append([frozen, *plans[0], *largest, *plans[1], takes, *_pipedream_cells(answer)])
    told = [
        f"{one.request.num_frozen} frozen: {text}" for one in answers if (text := _sureness(one))
    ]
    return "\n\n".join(filter(None, [text_table(rows), "\n".join(told)]))


def _cache_text(answers: Sequence[Answer], num_samples: int | None) -> str:
    """Write the size of a cache behind the frozen layers, at every depth above 0."""
    lines = []
    for answer in answers:
        if row_bytes := _cache_row_bytes(answer):
            whole = f", {as_bytes(row_bytes * num_samples)} for all" if num_samples else ""
            lines.append(
                f"cache behind {answer.request.num_frozen} frozen layers: "
                f"{as_bytes(row_bytes)} a sample{whole}"
            )
    return "\n".join(lines)


def _answer_json(answer: Answer) -> dict[str, Any]:
    chosen = answer.chosen
    return {
        "num_frozen": answer.request.num_frozen,
        "memory_limit_bytes": answer.request.memory_limit_bytes,
        "cache_row_bytes": _cache_row_bytes(answer),
        "chosen": chosen.to_json(),
        "range_s": answer.range_s,
        "near": [plan.to_json() for plan in answer.near],
        "stages": [] if isinstance(chosen, Refusal) else _stage_names(chosen, answer),
        "others": [other.to_json() for other in answer.others],
        "refusals": [refusal.to_json() for refusal in answer.refusals],
        "published": answer.published.to_json(),
        "pipedream": answer.pipedream.to_json(),
    }


def _cache_row_bytes(answer: Answer) -> int:
    return int(answer.place.profile.prefix_bytes(answer.request.num_frozen))


def _stage_names(explained: ExplainedPlan, answer: Answer) -> list[str]:
    """Name the sublayers that each stage trains; the first stage also holds the frozen ones."""
    names = [cost.name for cost in answer.place.profile.sublayers]
    cuts = explained.plan.boundaries
    stages = [
        names[first] if last == first + 1 else f"{names[first]} .. {names[last - 1]}"
        for first, last in pairwise(cuts)
    ]
    if cuts[0]:
        stages[0] += f", after {cuts[0]} frozen"
    return stages


def _stage_rows(explained: ExplainedPlan, answer: Answer) -> list[list[str]]:
    limit = answer.request.memory_limit_bytes
    rows = [["stage", "sublayers", "busy ms", "idle ms", "peak", "of the limit"]]
    for stage, names in enumerate(_stage_names(explained, answer)):
        peak = explained.plan.peak_bytes[stage]
        worker = sum(explained.workers[:stage])  # The stage's first, which is in flight longest.
        rows.append(
            [
                str(stage),
                names,
                _ms(explained.simulation.busy_s[worker]),
                _ms(explained.simulation.idle_s[worker]),
                as_bytes(peak),
                "no limit" if limit is None else f"{peak / limit:.0%} of {as_bytes(limit)}",
            ]
        )
    return rows


def _other_rows(answer: Answer) -> list[list[str]]:
    rows = [["", *_PLAN_COLUMNS, "why not"]]
    for other in (*answer.others, *answer.refusals, answer.published):
        name = "published rules" if other is answer.published else ""
        rows.append([name, *_plan_cells(other, answer), _why_not(other, answer)])
    if not isinstance(answer.pipedream, Refusal):
        name, rate = _pipedream_cells(answer)
        step_s = answer.request.global_batch / answer.pipedream.samples_per_s
        leaves = answer.pipedream.plan.leaves
        stages, unequal = str(len(leaves)), len({leaf.replicas for leaf in leaves}) > 1
        kind = "stages of unequal replicas, " if unequal else ""
        reason = f"{kind}never flushed: gradients of older weights"
        rows.append(["PipeDream", stages, name, "", "no flush", _ms(step_s), rate, reason])
    return rows


def _pipedream_cells(answer: Answer) -> list[str]:
    if isinstance(answer.pipedream, Refusal):
        return ["none", ""]
    return [answer.pipedream.plan.name, _number(answer.pipedream.samples_per_s)]


def replicated_text(answer: Answer) -> str:
    choice = answer.pipedream
    head = f"PipeDream's choice behind {answer.request.num_frozen} frozen layers: "
    if isinstance(choice, Refusal):
        return f"{head}none, {choice.reason}"
    return (
        f"{head}{choice.plan.name}, {choice.minibatch:.0f} samples every "
        f"{_ms(choice.plan.seconds)} ms, {_number(choice.samples_per_s)} samples/s, "
        f"{choice.plan.data_parallel_s / choice.plan.seconds:.2f} x data parallelism\n\n"
        f"{indent(choice.table(), '  ')}"
    )


def _plan_cells(found: ExplainedPlan | Refusal, answer: Answer) -> list[str]:
    if isinstance(found, Refusal):
        return [str(found.length or "none"), *[""] * 5]
    plan, request = found.plan, answer.request
    return [
        str(plan.length),
        _replicas_text(request, plan.length),
        str(plan.num_micro_batches),
        plan.manner,
        _ms(plan.predicted_step_s),
        _rate(found, answer),
    ]


def _why_not(other: ExplainedPlan | Refusal, answer: Answer) -> str:
    """Say why a plan was not chosen."""
    chosen = answer.chosen
    if isinstance(other, Refusal):
        return "see below" if other.length is None else other.reason
    if isinstance(chosen, Refusal):
        return ""
    if other.plan == chosen.plan:
        return "the choice itself"
    ratio = other.plan.predicted_step_s / chosen.plan.predicted_step_s
    # Beyond 1 %, but within the spread of the measurements.
    if not 1 / AS_FAST <= ratio <= AS_FAST and _is_alike(other.plan, chosen, answer):
        return "cannot be told apart, but a longer pipeline"
    if ratio < 1 / AS_FAST:
        return f"{1 / ratio:.2f} x as fast, but not by the rules that were asked for"
    if ratio > AS_FAST:
        return f"{ratio:.2f} x the time: {_largest_excess(other, chosen)}"
    if other.plan.length != chosen.plan.length:
        longer = other.plan.length > chosen.plan.length
        return f"as fast within 1 %, but a {'longer' if longer else 'shorter'} pipeline"
    more = other.plan.num_micro_batches > chosen.plan.num_micro_batches
    return f"as fast within 1 %, but {'more' if more else 'fewer'} micro-batches"


def _is_alike(other: PipelinePlan, chosen: ExplainedPlan, answer: Answer) -> bool:
    """Tell whether a plan is as near the fastest as the chosen, shorter one."""
    if not _is_nearest(chosen, answer):
        return False
    near = {plan.length: plan for plan in answer.near[1:]}
    return other.length in near and (
        other.num_micro_batches == near[other.length].num_micro_batches
        or other.predicted_step_s <= near[other.length].predicted_step_s
    )


def _largest_excess(other: ExplainedPlan, chosen: ExplainedPlan) -> str:
    """Name the part of a step in which a plan loses most against the chosen one."""
    mine, theirs = asdict(other.parts), asdict(chosen.parts)
    key = max(mine, key=lambda part: mine[part] - theirs[part])
    if key == "compute_s":
        return f"its micro-batches take {mine[key] / theirs[key]:.2f} x the time to compute"
    return f"{_PART_NAMES[key]} {_share(other, mine[key])} of the step"


def _ms(seconds: float) -> str:
    return _number(seconds * 1e3)


def _rate(explained: ExplainedPlan, answer: Answer) -> str:
    return _number(answer.request.global_batch / explained.plan.predicted_step_s)


def _number(value: float) -> str:
    """Write four digits, or all before the point."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _share(explained: ExplainedPlan, seconds: float) -> str:
    # Differences of equal sums may be a little below 0.
    return f"{max(0.0, seconds / explained.plan.predicted_step_s):.1%}"

"""Write the answers of `pipetransformer plan` as text, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from textwrap import indent
from typing import Any

from autopipe.plan import AS_FAST, ExplainedPlan, confidence
from autopipe.trace import as_bytes, text_table
from pipetransformer.cli.plan_answer import Answer, Refusal

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


def answers_text(model_name: str, answers: Sequence[Answer]) -> str:
    """Write the answers of one place for each number of frozen layers."""
    place, costs = answers[0].place, answers[0].place.profile.sublayers
    memory = "" if place.memory_bytes is None else f" of {as_bytes(place.memory_bytes)}"
    held = sum(cost.parameter_bytes for cost in costs)
    trained = sum(cost.gradient_bytes for cost in costs)
    of_which = "" if trained == held else f", {as_bytes(trained)} of them trained"
    batch = answers[0].request.global_batch
    head = [
        f"{model_name}: {len(costs)} sublayers, {as_bytes(held)} of parameters{of_which}",
        *(f"  assumed: {sentence}" for sentence in place.assumed),
        f"{place.name}: {place.num_slots} slots{memory}, {batch} samples a step",
    ]
    choices = _answer_text(answers[0]) if len(answers) == 1 else _frozen_text(answers)
    return "\n\n".join(filter(None, ["\n".join(head), choices, _cache_text(answers)]))


def answers_json(model_name: str, answers: Sequence[Answer]) -> dict[str, Any]:
    place = answers[0].place
    return {
        "model": model_name,
        "assumed": place.assumed,
        "place": place.name,
        "num_slots": place.num_slots,
        "global_batch": answers[0].request.global_batch,
        "answers": [
            {
                "num_frozen": answer.request.num_frozen,
                "memory_limit_bytes": answer.request.memory_limit_bytes,
                "cache_row_bytes": _cache_row_bytes(answer),
                "chosen": answer.chosen.to_json(),
                "range_s": answer.range_s,
                "near": [plan.to_json() for plan in answer.near],
                "stages": _stage_names(answer),
                "others": [other.to_json() for other in answer.others],
                "refusals": [refusal.to_json() for refusal in answer.refusals],
                "published": answer.published.to_json(),
                "pipedream": answer.pipedream.to_json(),
            }
            for answer in answers
        ],
    }


def _answer_text(answer: Answer) -> str:
    """Write the choice with its stages, and why others lost."""
    chosen = answer.chosen
    if isinstance(chosen, Refusal):
        head = f"no plan: {chosen.reason}"
    else:
        parts = asdict(chosen.parts)
        shares = ", ".join(
            f"{name} {_share(chosen, parts[key])}"
            for key, name in _PART_NAMES.items()
            if key not in ("reading_s", "recompute_s") or parts[key] > 0
        )
        lines = [f"choice: {_title(chosen, answer)}", shares, *_range_text(answer).split("; ")]
        stages = indent(text_table(_stage_rows(chosen, answer)), "  ")
        head = "\n  ".join(filter(None, lines)) + f"\n\n{stages}"
    text = f"{head}\n\nothers\n{indent(text_table(_other_rows(answer)), '  ')}"
    if isinstance(answer.published, Refusal):
        text += f"\n\npublished rules: {answer.published.reason}"
    return text


def _title(explained: ExplainedPlan, answer: Answer) -> str:
    length, replicas, count, manner, step_ms, rate = _plan_cells(explained, answer)
    request = answer.request
    idle = request.num_ranks - request.ranks_of(explained.plan.length)
    spares = f"; {idle} of {request.num_ranks} slots stay idle" if idle else ""
    return (
        f"K = {length}, R = {replicas}, M = {count}, {manner}: step {step_ms} ms, "
        f"{rate} samples/s{spares}"
    )


def _range_text(answer: Answer) -> str:
    chosen = answer.chosen
    if isinstance(chosen, Refusal) or answer.range_s is None:
        return ""
    return confidence(answer.range_s, answer.near, chosen.plan)


def _stage_names(answer: Answer) -> list[str]:
    """Name the sublayers that each stage trains; the first stage also holds the frozen ones."""
    if isinstance(answer.chosen, Refusal):
        return []
    names = [cost.name for cost in answer.place.profile.sublayers]
    cuts = answer.chosen.plan.boundaries
    stages = [
        " .. ".join(dict.fromkeys((names[first], names[last - 1])))
        for first, last in pairwise(cuts)
    ]
    if cuts[0]:
        stages[0] += f", after {cuts[0]} frozen"
    return stages


def _stage_rows(explained: ExplainedPlan, answer: Answer) -> list[list[str]]:
    limit, simulation = answer.request.memory_limit_bytes, explained.simulation
    rows = [["stage", "sublayers", "busy ms", "idle ms", "peak", "of the limit"]]
    for stage, names in enumerate(_stage_names(answer)):
        peak = explained.plan.peak_bytes[stage]
        worker = sum(explained.workers[:stage])  # The stage's first, which is in flight longest.
        times = [_ms(simulation.busy_s[worker]), _ms(simulation.idle_s[worker])]
        share = "no limit" if limit is None else f"{peak / limit:.0%} of {as_bytes(limit)}"
        rows.append([str(stage), names, *times, as_bytes(peak), share])
    return rows


def _other_rows(answer: Answer) -> list[list[str]]:
    rows = [["", *_PLAN_COLUMNS, "why not"]]
    for other in (*answer.others, *answer.refusals, answer.published):
        name = "published rules" if other is answer.published else ""
        rows.append([name, *_plan_cells(other, answer), _why_not(other, answer)])
    if not isinstance(answer.pipedream, Refusal):
        name, rate = _pipedream_cells(answer)
        step_s = answer.request.global_batch / answer.pipedream.samples_per_s
        replicas = [leaf.replicas for leaf in answer.pipedream.plan.leaves]
        kind = "stages of unequal replicas, " if len(set(replicas)) > 1 else ""
        reason = f"{kind}never flushed: gradients of older weights"
        cells = [str(len(replicas)), name, "", "no flush", _ms(step_s), rate]
        rows.append(["PipeDream", *cells, reason])
    return rows


def _frozen_text(answers: Sequence[Answer]) -> str:
    """Write the choice at each number of frozen layers, beside those of other rules."""
    rows = [
        ["frozen", *_PLAN_COLUMNS, "bubble", "all-reduce", "largest stage"]
        + ["published K", *_PLAN_COLUMNS[1:], "takes", "PipeDream's", "samples/s"]
    ]
    for answer in answers:
        chosen, published = answer.chosen, answer.published
        largest, takes = ["", "", ""], ""
        if not isinstance(chosen, Refusal):
            shares = (chosen.parts.bubble_s, chosen.parts.all_reduce_s)
            largest = [_share(chosen, part) for part in shares]
            largest.append(as_bytes(max(chosen.plan.peak_bytes)))
            if not isinstance(published, Refusal):
                takes = f"{published.plan.predicted_step_s / chosen.plan.predicted_step_s:.2f} x"
        frozen = str(answer.request.num_frozen)
        plans = _plan_cells(chosen, answer), _plan_cells(published, answer)
        rows.append([frozen, *plans[0], *largest, *plans[1], takes, *_pipedream_cells(answer)])
    ranges = [
        f"{answer.request.num_frozen} frozen: {text}"
        for answer in answers
        if (text := _range_text(answer))
    ]
    return "\n\n".join(filter(None, [text_table(rows), "\n".join(ranges)]))


def _cache_row_bytes(answer: Answer) -> int:
    return int(answer.place.profile.prefix_bytes(answer.request.num_frozen))


def _cache_text(answers: Sequence[Answer]) -> str:
    """Write the size of a row of the cache, at every depth above 0."""
    return "\n".join(
        f"cache behind {answer.request.num_frozen} frozen layers: {as_bytes(num_bytes)} a sample"
        for answer in answers
        if (num_bytes := _cache_row_bytes(answer))
    )


def _pipedream_cells(answer: Answer) -> list[str]:
    if isinstance(answer.pipedream, Refusal):
        return ["none", ""]
    return [answer.pipedream.plan.name, _number(answer.pipedream.samples_per_s)]


def _plan_cells(found: ExplainedPlan | Refusal, answer: Answer) -> list[str]:
    if isinstance(found, Refusal):
        return [str(found.length or "none"), *[""] * 5]
    plan, request = found.plan, answer.request
    workers = request.workers_of(plan.length)
    replicas = (
        "-".join(map(str, workers)) if max(workers) > 1 else request.replicas_of(plan.length)
    )
    rate = _number(request.global_batch / plan.predicted_step_s)
    shape = str(plan.length), str(replicas), str(plan.num_micro_batches), plan.manner
    return [*shape, _ms(plan.predicted_step_s), rate]


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
    near = {plan.length: plan for plan in answer.near[1:]}.get(other.plan.length)
    # Beyond 1 %, but within the spread of the measurements.
    if not 1 / AS_FAST <= ratio <= AS_FAST and near is not None:
        is_shape = other.plan.num_micro_batches == near.num_micro_batches
        if is_shape or other.plan.predicted_step_s <= near.predicted_step_s:
            return "cannot be told apart, but a longer pipeline"
    if ratio > AS_FAST:
        return f"{ratio:.2f} x the time: {_largest_excess(other, chosen)}"
    if other.plan.length != chosen.plan.length:
        longer = other.plan.length > chosen.plan.length
        return f"as fast within 1 %, but a {'longer' if longer else 'shorter'} pipeline"
    more = other.plan.num_micro_batches > chosen.plan.num_micro_batches
    return f"as fast within 1 %, but {'more' if more else 'fewer'} micro-batches"


def _largest_excess(other: ExplainedPlan, chosen: ExplainedPlan) -> str:
    """Name the part of a step in which a plan loses most against the chosen one."""
    mine, theirs = asdict(other.parts), asdict(chosen.parts)
    key = max(mine, key=lambda part: mine[part] - theirs[part])
    if key == "compute_s":
        return f"its micro-batches take {mine[key] / theirs[key]:.2f} x the time to compute"
    return f"{_PART_NAMES[key]} {_share(other, mine[key])} of the step"


def _ms(seconds: float) -> str:
    return _number(seconds * 1e3)


def _number(value: float) -> str:
    """Write four digits, or all before the point."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _share(explained: ExplainedPlan, seconds: float) -> str:
    # Differences of equal sums may be a little below 0.
    return f"{max(0.0, seconds / explained.plan.predicted_step_s):.1%}"

"""Change weights, samples and labels between the steps of odd models' runs: no number is wrong.

Averages are swapped in for an evaluation and out again, single values and rows are written in
place and through `.data`, labels and samples change, rows are rounded, and runs are resumed in
batches of another size. Every loss, evaluation, weight and optimizer state is that of a loop by
hand in float64, in which the same happens; rows are rounded in it once, where layers freeze.

What may not be drawn: a frozen layer that is written through `.data` in the middle of an epoch,
without an evaluation or a freeze beside it, which leaves no trace; and samples, or labels that
nobody can look at, that change under sampled checks. EDIT_SEED=n draws other cases.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from tests.helpers.odd import Case, Refusal, build_model, layers_of
from tests.helpers.odd_cases import LIMIT_S, cases, check_equal, check_refusal, round_of, shapes
from tests.helpers.odd_edits import EPOCHS, WAYS, EditedCase, Event, edited_by_hand, train_edited
from tests.helpers.pool import Pool
from tests.helpers.scenario import latest

SEED = int(os.environ.get("EDIT_SEED", "1"))
FEW_ROUNDS, NUM_ROUNDS, CASES_A_ROUND = 1, 101, 10
ROUND = round_of(CASES_A_ROUND, shrinks_if="EDIT_SHRINK")
LOOKS = ("evaluate", "revisit", "average")
KINDS = (*LOOKS, "edit", "edit", "relabel", "resample")


@st.composite
def edited_cases(draw: st.DrawFn, num_ranks: tuple[int, ...]) -> EditedCase:
    """Draw a model, a run, and what happens in it."""
    case = draw(cases(("none", "none", "none", "none", "none", "layer"), num_ranks))
    per_epoch = math.ceil(case.num_samples / case.batch_size)
    changes = {0, *draw(st.sets(st.integers(1, EPOCHS * per_epoch - 1), max_size=3))}
    frozen = {step: draw(st.integers(0, len(case.layers))) for step in sorted(changes)}
    pipelines = {}
    for step, num in frozen.items():
        first = sum(len(layer) for layer in case.layers[:num])
        active = range(first, len(case.kinds) + 1)
        pipelines[step] = draw(shapes(case.num_ranks, active, case.batch_size))
    cache = draw(st.sampled_from([True, True, True, False]))
    if case.optimizer == "rprop" and case.loss in ("l1", "margin"):
        # Of losses with straight parts a gradient may be zero but for rounding, whose sign counts.
        case = dataclasses.replace(case, loss="mse" if case.loss == "l1" else "ce")
    case = dataclasses.replace(
        case, frozen=frozen, pipelines=pipelines, cache=cache, look=None, measured=False
    )
    edited = EditedCase(
        case,
        {},
        draw(st.sampled_from(["shuffled", "sequential"])),
        draw(st.sampled_from(["tensors", "list", "targets", "opaque"])),
        draw(st.sampled_from(["sampled", "all"])),
        draw(st.sampled_from([None, None, "bfloat16", "float16"])),
        draw(st.sampled_from([None, None, None, 1500])),
    )
    if draw(st.sampled_from([False, False, True])):
        size = draw(st.integers(case.num_ranks, case.batch_size + 4))
        length = draw(st.integers(1, case.num_ranks))
        most = math.ceil(size / case.num_ranks)  # Where less is active the length is 1.
        pipeline = length, draw(st.integers(1, most)), "1f1b", ()
        stop = draw(st.integers(1, EPOCHS * per_epoch - 1))
        edited = dataclasses.replace(edited, resume=(stop, size, pipeline))
    return dataclasses.replace(edited, events=draw(events(edited)))


@st.composite
def events(draw: st.DrawFn, edited: EditedCase) -> dict[int, tuple[Event, ...]]:
    """Draw what happens between steps, as far as it leaves a trace."""
    steps = [*edited.steps()]
    gaps = draw(st.sets(st.integers(0, len(steps)), min_size=1, max_size=6))
    drawn: dict[int, tuple[Event, ...]] = {}
    for gap in sorted(gaps):
        begins = gap == len(steps) or steps[gap][3]
        found = []
        for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)):
            hides = kind == "resample" or (kind == "relabel" and edited.data == "opaque")
            if hides and edited.check == "sampled" and edited.case.cache:
                kind = "evaluate"
            number, whole = draw(st.integers(0, 99)), draw(st.booleans())
            found.append(Event(kind, draw(st.sampled_from(WAYS)), number, whole))
        frozen = [
            latest(edited.case.frozen, min(at, len(steps) - 1)) for at in (max(0, gap - 1), gap)
        ]
        looks = any(one.kind in LOOKS for one in found)
        if not begins and not looks and frozen[0] == frozen[1]:
            found = [traced(edited.case, one, frozen[0]) for one in found]
        drawn[gap] = tuple(found)
    return drawn


def traced(case: Case, event: Event, num_frozen: int) -> Event:
    """Return an edit that leaves a trace where it is of a frozen layer."""
    names = [*build_model(case).state_dict()]
    sublayer = names[event.number % len(names)].split("_")[0].split(".")[0]
    layer = len(case.layers) if sublayer == "head" else layers_of(case)[int(sublayer)]
    unseen = event.kind == "edit" and event.way == "through data" and layer < num_frozen
    return dataclasses.replace(event, way="in place") if unseen else event


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Count what was drawn and what came of it; tell at the end."""
    counts: Counter[str] = Counter()
    yield counts
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        sys.stdout.write(f"\nEDIT_SEED={SEED}: {dict(sorted(counts.items()))}\n")


def judge(pool: Pool, edited: EditedCase) -> str | None:
    """Train a case, and hold it against the loop by hand; return why it was refused, if it was."""
    with TemporaryDirectory(prefix="pipetransformer-test-") as folder:
        if edited.case.num_ranks == 1:
            ranks = [train_edited(edited, folder)]
        else:
            ranks = pool.run(train_edited, edited, folder, timeout_s=LIMIT_S)
    refusals = [one for one in ranks if isinstance(one, Refusal)]
    for refusal in refusals:
        check_refusal(edited.case, refusal)
    if refusals:
        assert len(refusals) == len(ranks), f"only some ranks refuse: {refusals[0].message}"
        return refusals[0].message
    check_equal(ranks, edited_by_hand(edited))
    return None


def hold(pool: Pool, seen: Counter[str], number: int, num_ranks: tuple[int, ...]) -> None:
    """Judge the cases of a round."""

    @seed(1000 * SEED + number)
    @ROUND
    @given(edited=edited_cases(num_ranks))
    def holds(edited) -> None:  # type: ignore[no-untyped-def]
        seen["cases"] += 1
        seen["resumed"] += edited.resume is not None
        seen["rounded"] += edited.cache_dtype is not None
        seen.update(f"{one.kind}s" for them in edited.events.values() for one in them)
        seen["refused" if judge(pool, edited) else "equal"] += 1

    holds()


@pytest.mark.parametrize("number", range(FEW_ROUNDS))
def test_what_changes_between_steps_shows_as_by_hand(
    two_ranks: Pool, seen: Counter[str], number: int
) -> None:
    hold(two_ranks, seen, number, (1,))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FEW_ROUNDS, FEW_ROUNDS + NUM_ROUNDS))
def test_what_changes_in_many_runs_shows_as_by_hand(
    two_ranks: Pool, seen: Counter[str], number: int
) -> None:
    hold(two_ranks, seen, number, (1, 1, 1, 2))

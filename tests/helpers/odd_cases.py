"""Draw odd cases, and judge what came of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor

from autopipe.plan.request import replicas_of
from tests.helpers.forced import assert_replicas_equal
from tests.helpers.odd import EPOCHS, Case, Pipeline, Refusal, by_hand, train
from tests.helpers.odd_kinds import FIRST, MIDDLE, ODD_FIRST, ODD_MIDDLE
from tests.helpers.odd_training import LOSSES, ODD_LOSSES, ODD_OPTIMIZERS, OPTIMIZERS
from tests.helpers.pool import Pool
from tests.helpers.scenario import Outcome, merge

LIMIT_S = 75.0  # What hangs ends earlier, by the time limits of the Trainer.
ODD_PARTS = ("none", "none", "none", "none", "layer", "layer", "first", "optimizer", "loss")
"""What of a case may be refused: one thing at most, and mostly none."""

NUM_RANKS = (1, 2, 4, 3)
EVERYTHING = {
    *(kind for table in (FIRST, ODD_FIRST, MIDDLE, ODD_MIDDLE) for kind in table),
    *(f"by {name}" for table in (OPTIMIZERS, ODD_OPTIMIZERS) for name in table),
    *(f"for {name}" for table in (LOSSES, ODD_LOSSES) for name in table),
    *(f"on {num_ranks}" for num_ranks in NUM_RANKS),
}


def round_of(num_cases: int, *, shrinks_if: str) -> settings:
    """Return how hypothesis draws a round; it shrinks a failing case if the variable is set."""
    return settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if os.environ.get(shrinks_if) else [])],
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def cases(
    draw: st.DrawFn, odd_parts: tuple[str, ...] = ODD_PARTS, num_ranks: tuple[int, ...] = NUM_RANKS
) -> Case:
    """Draw a model, and a run whose pipeline and frozen layers change at some steps."""
    odd = draw(st.sampled_from(odd_parts))
    ranks = draw(st.sampled_from(num_ranks))
    kinds = draw(models(odd))
    begins = draw(st.sets(st.integers(1, len(kinds) - 1), max_size=len(kinds) - 1))
    cuts = [0, *sorted(begins), len(kinds)]
    layers = tuple(tuple(kinds[a:b]) for a, b in zip(cuts, cuts[1:], strict=False))
    batch_size = draw(st.integers(ranks, ranks + 4))
    # Three steps an epoch or four; the last batch may be too small for every replica.
    num_samples = draw(st.integers(2 * batch_size + 1, 4 * batch_size))
    num_steps = math.ceil(num_samples / batch_size) * EPOCHS
    changes = sorted({0, *draw(st.sets(st.integers(1, num_steps - 1), max_size=3))})
    frozen, pipelines = {}, {}
    for step in changes:
        frozen[step] = draw(st.one_of(st.just(0), st.integers(0, len(layers))))
        first = sum(len(layer) for layer in layers[: frozen[step]])
        pipelines[step] = draw(shapes(ranks, range(first, len(kinds) + 1), batch_size))
    optimizers = list(ODD_OPTIMIZERS if odd == "optimizer" else OPTIMIZERS)
    if "gaps" in kinds:
        # torch's own fused updates go wrong there: they take a parameter's memory for dense.
        optimizers = [name for name in optimizers if "fused" not in name]
    return Case(
        layers,
        draw(st.sampled_from(optimizers)),
        draw(st.sampled_from(list(ODD_LOSSES if odd == "loss" else LOSSES))),
        num_ranks=ranks,
        pipelines=pipelines,
        frozen=frozen,
        batch_size=batch_size,
        num_samples=num_samples,
        max_grad_norm=draw(st.sampled_from([None, 0.5])),
        cache=draw(st.sampled_from([True, False])),
        prefix_chunk=draw(st.sampled_from([8, 3, 2, 1])),
        look=draw(st.one_of(st.none(), st.integers(0, num_steps - 1))),
        measured=draw(st.sampled_from([False] * 5 + [True])),
    )


@st.composite
def models(draw: st.DrawFn, odd: str) -> list[str]:
    """Draw the kinds of sublayers, bottom first."""
    kinds = [draw(st.sampled_from(list(ODD_FIRST if odd == "first" else FIRST)))]
    kinds += draw(st.lists(st.sampled_from(list(MIDDLE)), min_size=1, max_size=4))
    if odd == "layer":
        kinds.insert(draw(st.integers(1, len(kinds))), draw(st.sampled_from(list(ODD_MIDDLE))))
    if {"reentrant", "shared_reentrant"} & {*kinds}:
        # A reentrant checkpoint trains nothing where its input needs no gradient. Behind a frozen
        # layer, "routed" lets that depend on the samples, and so on the micro-batch.
        kinds = ["mlp" if kind == "routed" else kind for kind in kinds]
    if kinds[0] == "tokens":
        kinds.insert(1, "embedding")
    return kinds


@st.composite
def shapes(draw: st.DrawFn, num_ranks: int, active: range, batch_size: int) -> Pipeline:
    """Draw a pipeline over the active sublayers."""
    length = draw(st.integers(1, min(num_ranks, len(active))))
    most = math.ceil(batch_size / replicas_of(length, num_ranks, num_ranks))
    begins = st.sets(st.sampled_from(active[1:] or [0]), min_size=length - 1, max_size=length - 1)
    return (
        length,
        draw(st.integers(1, most)),
        draw(st.sampled_from(["gpipe", "1f1b"])),
        tuple(sorted(draw(begins))),
    )


def ingredients(case: Case) -> set[str]:
    """Name what a case has of everything that can be drawn."""
    return {*case.kinds, f"by {case.optimizer}", f"for {case.loss}", f"on {case.num_ranks}"}


def judge(pool: Pool, case: Case) -> str | None:
    """Train a case, and hold it against the loop by hand.

    Returns:
        by what message it was refused; None where it was trained as by hand.
    Raises:
        AssertionError: it is neither equal nor rightly refused.
    """
    ranks = pool.run(train, case, timeout_s=LIMIT_S)
    refusals = [one for one in ranks if isinstance(one, Refusal)]
    if not refusals:
        assert not case.must_be_refused, "trained what is to be refused"
        check_equal(ranks, by_hand(case))
        return None
    assert len(refusals) == len(ranks), f"only some ranks refuse: {refusals[0].message}"
    for refusal in refusals:
        check_refusal(case, refusal)
    return refusals[0].message


def check_refusal(case: Case, refusal: Refusal) -> None:
    """Assert that a case may be refused, and that its refusal names why."""
    words = case.words()
    assert words, f"refused an ordinary model: {refusal.message}"
    assert any(word in refusal.message for word in words), (
        f"refused without naming one of {words}: {refusal.message}"
    )
    assert not refusal.changed, f"refused ({refusal.message}), but changed {refusal.changed}"


def check_equal(ranks: list[Outcome], reference: Outcome) -> None:
    """Assert that losses, weights, buffers and optimizer state are the loop's, on all replicas."""
    ours = merge(ranks)
    losses = [{"loss": torch.tensor(one.losses)} for one in (ours, reference)]
    looks = [
        {
            f"{key} of evaluation {number}": torch.tensor(value)
            for number, means in enumerate(one.extra["evaluations"])
            for key, value in means.items()
        }
        for one in (ours, reference)
    ]
    # A parameter that was never trained never came to an optimizer, which might have begun it.
    initial = reference.extra["initial"]
    states = {
        key: state
        for key, state in reference.states.items()
        if key in ours.states or key not in initial or not torch.equal(state, initial[key])
    }
    wrong = [
        *differences(*losses),
        *differences(*looks),
        *differences(ours.weights, reference.weights),
        *differences(ours.states, states),
    ]
    assert not wrong, f"not as by hand: {'; '.join(wrong)}"
    assert_replicas_equal(ranks)


def differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Iterator[str]:
    """Tell how tensors differ by more than |difference| <= 1e-9 + 1e-7 * max|tensor|.

    All is in float64, so that rounding differs by 1e-16 a sum; the limits are a million times as
    wide, as steps that divide by small moments amplify it, and narrower than any mistake.
    """
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield f"{name} only {'by hand' if name in theirs else 'in ours'}"
    for name in sorted(ours.keys() & theirs.keys()):
        mine, other = (
            (torch.view_as_real(one) if one.is_complex() else one).double()
            for one in (ours[name], theirs[name])
        )
        if mine.shape != other.shape:
            yield f"{name} is {tuple(mine.shape)} for {tuple(other.shape)}"
        elif not torch.allclose(mine, other, rtol=0.0, atol=1e-9 + 1e-7 * most(other)):
            yield f"{name} off by {most(mine - other):.2g}"


def most(values: Tensor) -> float:
    """Return the largest absolute value."""
    return float(values.abs().max()) if values.numel() else 0.0

"""Draw runs whose pipeline and frozen layers change at any steps, run them, and hold them against
the invariants.

What may change, also several things at once and at consecutive steps: the pipeline's length K (and
so the replicas R, and which ranks are idle), its cuts, the micro-batches M, the schedule, whether
forwards run again in the backward, and the frozen layers, up and down.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import Tensor

from autodp.sampler import EpochSampler
from autopipe.plan.request import fitting_lengths, length_choices, replicas_of
from pipetransformer import Trainer
from pipetransformer.measure.measurements import measure
from tests.helpers.inspection import deployment_of, elastic_of, feed_of, layered_of, stage_of
from tests.helpers.measured import measuring, never
from tests.helpers.models import NUM_DEEP_LAYERS, deep_model
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.scenario import (
    PEAK_LEARNING_RATE,
    Deep,
    FreezeTable,
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    assert_same_bits,
    collect,
    latest,
    make_trainer,
    merge,
    slow_start,
    train,
)

EPOCHS = 3
LIMIT_S = 240.0  # What hangs within a step ends earlier, by step_timeout_s.
NUM_SUBLAYERS = len(deep_model().sublayers)
FIRST_ACTIVE = [deep_model().first_active(frozen) for frozen in range(NUM_DEEP_LAYERS + 1)]
# A user's own fixed layers make stages whose output, or all of whose parameters, need no gradient.
FIXED = (
    (),
    ("embedding",),
    ("embedding", "mix0", "mlp0"),
    ("mix2",),
    ("mix4", "mlp4"),
    ("mlp6", "head"),
)
PARTS = ("length", "micro_batches", "schedule", "cuts", "frozen", "recomputes")
SETTINGS = st.fixed_dictionaries(
    {
        "max_grad_norm": st.sampled_from([None, 0.5]),
        "cache": st.booleans(),
        "cache_limit_bytes": st.sampled_from([None, 1000]),
        "prefix_chunk": st.integers(1, 4),
        "step_timeout_s": st.just(30.0),
    }
)


@st.composite
def scenarios(draw: st.DrawFn, num_ranks: int) -> Scenario:
    """Draw a run whose pipeline and frozen layers change at any steps."""
    nodes = [slots for slots in range(2, num_ranks) if num_ranks % slots == 0]
    slots = draw(st.sampled_from([None, *nodes]))
    batch_size = draw(st.integers(num_ranks, num_ranks + 5))
    num_samples = draw(st.integers(batch_size + 1, 3 * batch_size))
    deep = Deep(draw(st.sampled_from(FIXED)), draw(st.booleans()), num_samples)
    num_steps = -(-num_samples // batch_size) * EPOCHS
    changes = draw(st.sets(st.integers(1, num_steps - 1), min_size=1, max_size=6))
    cluster = num_ranks, slots or num_ranks
    possible = sorted(chain(*length_choices(*cluster)))
    shape, frozen = Shape(1, 1), 0
    shapes, frozen_at = {}, {}
    for step in sorted({0, *changes}):
        parts = draw(st.sets(st.sampled_from(PARTS), min_size=1)) if step else set(PARTS)
        if "frozen" in parts:
            # The head alone is left, and may be one of the fixed.
            frozen = draw(st.integers(0, NUM_DEEP_LAYERS - ("head" in deep.fixed)))
        lengths = [one for one in possible if one <= NUM_SUBLAYERS - FIRST_ACTIVE[frozen]]
        shape = draw(
            shapes_like(
                shape,
                parts,
                lengths=lengths,
                first=FIRST_ACTIVE[frozen],
                most=lambda k: math.ceil(batch_size / replicas_of(k, *cluster)),
            )
        )
        shapes[step], frozen_at[step] = shape, frozen
    looks = draw(st.sets(st.integers(0, num_steps - 1), max_size=2))
    return Scenario(
        shapes,
        frozen_at,
        settings={"global_batch_size": batch_size, "epochs": EPOCHS, **draw(SETTINGS)},
        deep=deep,
        slots_per_node=slots,
        looks=tuple(sorted(looks)),
    )


@st.composite
def shapes_like(
    draw: st.DrawFn,
    before: Shape,
    parts: set[str],
    *,
    lengths: list[int],
    first: int,
    most: Callable[[int], int],
) -> Shape:
    """Draw a pipeline that differs from the one before in some parts, or where it must."""
    length = before.length
    if "length" in parts or length not in lengths:
        length = draw(st.sampled_from(lengths))
    micro_batches = min(before.micro_batches, most(length))
    if "micro_batches" in parts:
        micro_batches = draw(st.integers(1, most(length)))
    schedule = before.schedule
    if "schedule" in parts:
        schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    cuts = before.cuts
    if len(cuts) != length - 1 or cuts and cuts[0] <= first:
        cuts = ()
    if "cuts" in parts and length > 1:
        begins = st.sets(
            st.integers(first + 1, NUM_SUBLAYERS - 1), min_size=length - 1, max_size=length - 1
        )
        cuts = tuple(sorted(draw(begins)))
    again = draw(st.booleans()) if "recomputes" in parts else before.recomputes
    return Shape(length, micro_batches, schedule, cuts, spares=True, recomputes=again)


def train_watched(scenario: Scenario) -> Outcome:
    """Run the scenario on this world, and note after every step what the invariants speak of.

    Returns:
        this rank's outcome; in `extra` beside what `collect` notes: the gradient's "norms", what
        the policy was shown ("contexts"), the losses over all data ("evaluations"), the ids that
        this rank read for each step ("read"), and the "digests" of what it holds after each.
    """
    policy = scenario.policy()
    notes: dict[str, list[Any]] = {"norms": [], "evaluations": [], "read": [], "digests": []}
    losses = []
    with measuring(never), make_trainer(scenario, policy) as trainer:
        watch_reads(trainer, notes["read"])
        while not trainer.is_over:
            notes["read"].append([])
            step = trainer.global_step
            result = trainer.step()
            losses.append(result.loss)
            notes["norms"].append(result.gradient_norm)
            notes["digests"].append(digests_of_this_rank(trainer))
            if step in scenario.looks:
                notes["evaluations"].append(look(trainer))
        outcome = collect(trainer, losses)
    contexts = policy.contexts if isinstance(policy, FreezeTable) else []
    outcome.extra.update(notes, contexts=contexts)
    return outcome


def look(trainer: Trainer) -> float:
    """Do between two steps what must change nothing; return the loss over all data."""
    loss = trainer.evaluate(feed_of(trainer).dataset)["loss"]
    trainer.state_dict()
    before = trainer.measurements
    with measuring(measure):
        trainer.measure()
    # The examples must not depend on what was measured.
    elastic_of(trainer).planner.profile = before
    return loss


def watch_reads(trainer: Trainer, read: list[list[int]]) -> None:
    """Add the ids that this rank asks its prefix for to the last list of `read`."""
    fetch = feed_of(trainer).fetch

    def watched(ids: Tensor, **settings: Any) -> dict[str, Tensor]:
        read[-1].extend(ids.tolist())
        return fetch(ids, **settings)

    feed_of(trainer).fetch = watched  # type: ignore[method-assign]


def digests_of_this_rank(trainer: Trainer) -> dict[str, str]:
    """Return a digest of each tensor that this rank holds or keeps in its optimizer."""
    model, stage = layered_of(trainer), stage_of(trainer)
    tensors = {
        name: tensor
        for index in deployment_of(trainer)._ownership.held_by(trainer.world.rank)
        for name, tensor in model.tensors(index).items()
    }
    for name, parameter in stage.trained.parameters.items():
        state = stage.trained.optimizer.state.get(parameter, {}) if stage.trained.optimizer else {}
        tensors.update({f"{name}/{key}": tensor for key, tensor in state.items()})
    return {
        name: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def assert_as_plain(ranks: list[Outcome], scenario: Scenario) -> None:
    """Compare a watched run with the hand-written loop, step by step."""
    ours, reference = merge(ranks), plain(scenario)
    assert_equal(ours, reference)
    for name in ("norms", "evaluations"):
        assert ours.extra[name] == pytest.approx(reference.extra[name], abs=1e-9, rel=1e-7)
    contexts = ours.extra["contexts"]
    for step, context in enumerate(contexts):
        # 0 where rank 0's stage has no optimizer; see test_bugs.py.
        expected_rate = PEAK_LEARNING_RATE * slow_start(step, 0)
        assert context["learning_rate"] == 0.0 or context["learning_rate"] == pytest.approx(
            expected_rate
        )
        if step > 0:
            first = latest(scenario.frozen, step - 1)
            expected = reference.extra["layer_norms"][step - 1]
            assert context["norms"][:first] == [None] * first
            assert context["norms"][first:] == pytest.approx(expected[first:], abs=1e-9, rel=1e-7)


def assert_each_sample_once(ranks: list[Outcome], scenario: Scenario) -> None:
    """Compare the samples of every step, over all ranks, with those of the sampler."""
    assert scenario.deep is not None
    size, num_samples = scenario.options["global_batch_size"], scenario.deep.num_samples
    per_epoch = -(-num_samples // size)
    sampler = EpochSampler(num_samples, scenario.order(num_samples))
    by_step = zip(*(rank.extra["read"] for rank in ranks), strict=True)
    by_epoch: dict[int, Counter[int]] = {}
    for step, read in enumerate(by_step):
        epoch, position = divmod(step, per_epoch)
        ids = sorted(index for one in read for index in one)
        assert ids == sorted(sampler.global_batch(epoch, position * size, size).tolist())
        by_epoch.setdefault(epoch, Counter()).update(ids)
    epochs = scenario.options["epochs"]
    assert list(by_epoch.values()) == [Counter(range(num_samples))] * epochs


def assert_replicas_equal(ranks: list[Outcome]) -> None:
    """Compare what several ranks hold, after every step, bit by bit."""
    for step, held in enumerate(zip(*(rank.extra["digests"] for rank in ranks), strict=True)):
        for name in {name for one in held for name in one}:
            distinct = {one[name] for one in held if name in one}
            assert len(distinct) == 1, f"{name} after step {step}"


def static(scenario: Scenario, num_ranks: int) -> Scenario:
    """Keep the freeze decisions, and take the longest pipeline that all of them allow."""
    assert not isinstance(scenario.frozen, tuple)
    most = NUM_SUBLAYERS - FIRST_ACTIVE[max(scenario.frozen.values())]
    allowed = fitting_lengths(num_ranks, scenario.slots_per_node or num_ranks)
    length = max(one for one in allowed if one <= most)
    return dataclasses.replace(scenario, shapes={0: Shape(length, length)})


def check(pool: Pool, scenario: Scenario) -> Outcome:
    """Run a scenario, hold it against the invariants, and return what it came to."""
    ranks = pool.run(train_watched, scenario, timeout_s=LIMIT_S)
    assert_replicas_equal(ranks)
    assert_each_sample_once(ranks, scenario)
    assert_as_plain(ranks, scenario)
    return merge(ranks)


def check_with_static(pool: Pool, scenario: Scenario) -> None:
    """Hold a scenario against the invariants and against the run whose pipeline never changes."""
    outcome = check(pool, scenario)
    assert_equal(
        outcome, merge(pool.run(train, static(scenario, pool.num_ranks), timeout_s=LIMIT_S))
    )


def with_dropout(scenario: Scenario, num_ranks: int) -> Scenario:
    """Add dropout, and cut each global batch into the same micro-batches whatever the pipeline.

    R replicas of M micro-batches make R * M = `num_ranks` of a batch, all of two samples; in the
    epoch's last batch, which is short, of one.
    """
    assert scenario.deep is not None
    slots = scenario.slots_per_node or num_ranks
    return dataclasses.replace(
        scenario,
        dropout=0.2,
        shapes={
            step: dataclasses.replace(
                shape, micro_batches=num_ranks // replicas_of(shape.length, num_ranks, slots)
            )
            for step, shape in scenario.shapes.items()
        },
        settings={**scenario.settings, "global_batch_size": 2 * num_ranks},
        deep=dataclasses.replace(scenario.deep, num_samples=5 * num_ranks),
    )


def check_dropout(pool: Pool, scenario: Scenario) -> None:
    """Train twice, which must give the same bits, and in a pipeline that never changes."""
    scenario = with_dropout(scenario, pool.num_ranks)
    first, again, unchanged = (
        merge(pool.run(train, one, timeout_s=LIMIT_S))
        for one in (scenario, scenario, static(scenario, pool.num_ranks))
    )
    assert_same_bits(first, again)
    assert_equal(first, unchanged)

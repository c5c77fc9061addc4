"""Prove that signals are those of a plain loop, on any pipeline, through cuts and resumes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autodp.sampler import EpochSampler, shuffled
from freeze import LayerStats
from freeze.signals import gram, linear_cka, similarity_change
from pipetransformer import Trainer
from pipetransformer.elastic import read_looks
from pipetransformer.report import read_decisions
from tests.helpers.inspection import elastic_of
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.plain_scenario import mean_loss
from tests.helpers.pool import Pool
from tests.helpers.scenario import Scenario, Shape, build_adamw, slow_start

SIGNALS = ("gradient_norm", "accumulated_gradient", "relative_update", "probe_cka", "probe_change")
INTERVAL, PROBED = 4, 8
SETTINGS: Mapping[str, Any] = {
    "freeze_interval_steps": INTERVAL,
    "signals": SIGNALS,
    "probe_samples": PROBED,
}
Seen = list[dict[str, Any]]


def seen_in(folder: str) -> Seen:
    """Return what was shown at each decision after the first."""
    return [
        {
            "step": one.context.step,
            "loss": one.context.loss,
            **{s: [getattr(layer, s) for layer in one.context.layers] for s in SIGNALS},
        }
        for one in read_decisions(Path(folder))[1:]
    ]


def trainer_of(scenario: Scenario, folder: str, **settings: Any) -> Trainer:
    """Build a trainer that measures everything."""
    model, data, loss_fn = scenario.problem()
    options = {**scenario.options, **SETTINGS, **settings}
    policy = scenario.policy()
    return Trainer(
        model, data, loss_fn=loss_fn, optimizer=build_adamw, freeze=policy, folder=folder,
        **options,
    )  # fmt: skip


@measuring(never)
def fit(scenario: Scenario, folder: str, **settings: Any) -> None:
    """Train to the end."""
    with trainer_of(scenario, folder, **settings) as trainer:
        trainer.fit()


@measuring(never)
def fit_in_two(scenario: Scenario, folder: str) -> None:
    """Train with a stop within an interval, and resume."""
    saving = {"checkpoint_every_steps": 1, "resume": "auto"}
    with trainer_of(scenario, folder, **saving) as trainer:
        for _ in range(6):
            trainer.step()
    with trainer_of(scenario, folder, **saving) as trainer:
        trainer.fit()


def plainly(scenario: Scenario) -> Seen:
    """Measure the same in a hand-written loop."""
    layered, data, loss_fn = scenario.problem()
    options, model = scenario.options, layered.model
    named = list(model.named_parameters())
    optimizer = build_adamw(named)
    layer_of = {
        name: sublayer.layer
        for index, sublayer in enumerate(layered.sublayers)
        for name in layered.tensors(index)
    }
    sampler = EpochSampler(len(data), shuffled(len(data), seed=options["seed"]))
    per_epoch = -(-len(data) // options["global_batch_size"])
    probe = torch.arange(PROBED) * len(data) // PROBED
    ends = [
        sublayer
        for sublayer, above in zip(layered.sublayers, layered.sublayers[1:], strict=False)
        if above.layer != sublayer.layer
    ]

    def outputs() -> list[Tensor]:
        found: list[Tensor] = []
        handles = [
            one.module.register_forward_hook(lambda module, inputs, out: found.append(out))
            for one in ends
        ]
        with torch.no_grad():
            model(data[probe][0])
        for handle in handles:
            handle.remove()
        return [gram(one) for one in found]

    first, seen = outputs(), []
    norms: list[list[list[Tensor]]] = []
    losses: list[float] = []
    before = {name: p.detach().clone() for name, p in named}
    for step in range(per_epoch * options["epochs"]):
        if step and step % INTERVAL == 0:
            seen.append(_summary(step, norms, losses, named, before, layer_of))
            seen[-1]["probe_cka"] = [
                linear_cka(a, b) for a, b in zip(outputs(), first, strict=True)
            ]
            seen[-1]["probe_change"] = [
                similarity_change(a, b) for a, b in zip(outputs(), first, strict=True)
            ]
            norms, losses = [], []
            before = {name: p.detach().clone() for name, p in named}
        epoch, position = divmod(step, per_epoch)
        size = options["global_batch_size"]
        ids = sampler.global_batch(epoch, position * size, size)
        optimizer.zero_grad(set_to_none=True)
        loss = mean_loss(model, data, ids, loss_fn)
        loss.backward()
        norms.append([[p.grad.clone()] for _, p in named if p.grad is not None])
        losses.append(loss.item())
        nn.utils.clip_grad_norm_([p for _, p in named], options["max_grad_norm"])
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * slow_start(step, 0)
        optimizer.step()
    return seen


def _summary(  # noqa: PLR0913
    step: int,
    gradients: list[list[list[Tensor]]],
    losses: list[float],
    named: list[tuple[str, nn.Parameter]],
    before: dict[str, Tensor],
    layer_of: dict[str, int],
) -> dict[str, Any]:
    """Put an interval together by the formulas of `LayerStats`."""
    steps, num_layers = len(gradients), max(layer_of.values())
    found: dict[str, Any] = {"step": step, "loss": sum(losses) / steps}
    for name in SIGNALS[:3]:
        found[name] = []
    for layer in range(num_layers):
        own = [i for i, (name, _) in enumerate(named) if layer_of[name] == layer]
        by_step = [torch.cat([g[i][0].flatten() for i in own]) for g in gradients]
        squares = sum(float(g.square().sum()) for g in by_step) / steps
        found["gradient_norm"].append(math.sqrt(squares))
        found["accumulated_gradient"].append(float(torch.stack(by_step).sum(0).abs().sum()))
        moved = torch.cat([(named[i][1] - before[named[i][0]]).flatten() for i in own])
        was = torch.cat([before[named[i][0]].flatten() for i in own])
        found["relative_update"].append(float((moved.norm() / was.norm()).detach()) / steps)
    return found


def assert_same_signals(ours: Seen, theirs: Seen) -> None:
    """Compare all of them; those of frozen layers are None."""
    assert [one["step"] for one in ours] == [one["step"] for one in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-6, abs=1e-9)
        for name in SIGNALS:
            for a, b in zip(mine[name], other[name], strict=True):
                assert a == (None if b is None else pytest.approx(b, rel=1e-6, abs=1e-9)), name


SCENARIO = Scenario({0: Shape(1, 2)})


@pytest.fixture(scope="module")
def truth() -> Seen:
    return plainly(SCENARIO)


def test_signals_are_a_plain_loop_s(tmp_path: Path, truth: Seen) -> None:
    fit(SCENARIO, str(tmp_path))
    ours = seen_in(str(tmp_path))
    assert len(ours) == 3 and all(None not in one[name] for one in ours for name in SIGNALS)
    assert_same_signals(ours, truth)
    # One look at the start, one at each decision, one at the end.
    steps = sorted(path.stem for path in (tmp_path / "probes").iterdir())
    assert steps == [f"step-{step:08d}" for step in (0, 4, 8, 12, 15)]


@pytest.mark.parametrize(
    "shapes",
    [
        slow({0: Shape(2, 3)}),
        # What was measured moves on with its layers within an interval.
        {0: Shape(1, 2), 4: Shape(2, 3, cuts=(2,)), 8: Shape(2, 2, cuts=(4,)), 12: Shape(1, 1)},
    ],
)
def test_signals_do_not_depend_on_the_pipeline(
    two_ranks: Pool, tmp_path: Path, truth: Seen, shapes: dict[int, Shape]
) -> None:
    two_ranks.run(fit, Scenario(shapes), str(tmp_path))
    assert_same_signals(seen_in(str(tmp_path)), truth)


def test_signals_do_not_depend_on_replicas(four_ranks: Pool, tmp_path: Path, truth: Seen) -> None:
    four_ranks.run(fit, Scenario({0: Shape(2, 2), 8: Shape(1, 1)}), str(tmp_path))
    assert_same_signals(seen_in(str(tmp_path)), truth)


@measuring(never)
def fit_with_a_change_within_an_interval(scenario: Scenario, folder: str) -> None:
    """Train to the end, with the pipeline of step 6 from that step on."""
    with trainer_of(scenario, folder) as trainer:
        for _ in range(6):
            trainer.step()
        elastic, current = elastic_of(trainer), trainer.decision
        assert current is not None
        plan, _ = elastic.planner.plan(elastic.clock(), 0, current)
        elastic.decision = dataclasses.replace(current, plan=plan)
        elastic.deployment.change(elastic.decision)
        trainer.fit()


def test_what_half_an_interval_has_shown_moves_on_with_its_layers(
    two_ranks: Pool, tmp_path: Path, truth: Seen
) -> None:
    scenario = Scenario({0: Shape(2, 2, cuts=(2,)), 6: Shape(2, 3, cuts=(4,))})
    two_ranks.run(fit_with_a_change_within_an_interval, scenario, str(tmp_path))
    assert_same_signals(seen_in(str(tmp_path)), truth)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.slow
def test_half_an_interval_survives_a_resume_bit_by_bit(
    two_ranks: Pool, tmp_path: Path, length: int
) -> None:
    scenario = Scenario({0: Shape(length, 2)}, dtype="float32")
    two_ranks.run(fit, scenario, str(tmp_path / "whole"))
    two_ranks.run(fit_in_two, scenario, str(tmp_path / "cut"))
    assert seen_in(str(tmp_path / "cut")) == seen_in(str(tmp_path / "whole"))


def test_frozen_layers_have_no_signals_and_the_others_go_on(
    two_ranks: Pool, tmp_path: Path
) -> None:
    frozen = {0: 0, 8: 2}
    alone, two = str(tmp_path / "alone"), str(tmp_path / "two")
    fit(Scenario({0: Shape(1, 2)}, frozen=frozen), alone)
    two_ranks.run(fit, Scenario({0: Shape(2, 2)}, frozen=frozen), two)
    ours = seen_in(two)
    for name in SIGNALS:
        assert ours[1][name][:2] != [None, None] and ours[2][name][:2] == [None, None]
        assert None not in ours[2][name][2:]
    assert_same_signals(ours, seen_in(alone))


@pytest.mark.parametrize("resumes", [slow(False), True])
def test_a_layer_that_thaws_is_compared_with_its_first_look(tmp_path: Path, resumes: bool) -> None:
    # Frozen at the start, it was in no look then: KeyError.
    scenario = Scenario({0: Shape(1, 2)}, frozen={0: 1, INTERVAL: 0})
    (fit_in_two if resumes else fit)(scenario, str(tmp_path))
    thaw, first, second = seen_in(str(tmp_path))
    for name in ("probe_cka", "probe_change"):
        assert thaw[name][0] is first[name][0] is None and second[name][0] is not None
        assert all(None not in one[name][1:] for one in (thaw, first, second))
    looks = read_looks(tmp_path / "probes")
    assert second["probe_cka"][0] == pytest.approx(linear_cka(looks[12][0], looks[8][0]))


def test_layers_without_a_signal_are_said_to_have_none() -> None:
    assert all(getattr(LayerStats("layer 0", 0, 1), name) is None for name in SIGNALS)

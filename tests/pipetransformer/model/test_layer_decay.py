"""Learning rates fall from layer to layer as timm's do, in every stage alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.optim import Adam, Optimizer

from pipetransformer import LayeredModel, Sublayer, adamw, named_optimizer
from pipetransformer.model import NamedParameters, adapt, decay_by_layer
from pipetransformer.model.optimizers import learning_rate_scales
from tests.adapted import classifier, timm_vit
from tests.models import tiny_model


def rates(model: nn.Module, groups: list[dict[str, Any]], key: str = "lr") -> dict[str, Any]:
    """Return the learning rate, or another setting, of every parameter by its name."""
    found = {parameter: name for name, parameter in model.named_parameters()}
    return {found[p]: group[key] for group in groups for p in group["params"]}


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2, "pre_norm": True}])
def test_rates_of_a_vit_are_timm_s_but_for_its_last_norm(
    options: dict[str, Any],
) -> None:
    model = timm_vit(depth=5, **options)
    factory = decay_by_layer(adamw(0.2, weight_decay=0.3), adapt(model), 0.75)
    ours = factory(list(model.named_parameters())).param_groups
    theirs = param_groups_layer_decay(model, weight_decay=0.3, layer_decay=0.75)
    expected = {name: 0.2 * scale for name, scale in rates(model, theirs, "lr_scale").items()}
    # timm counts it with the last block, BEiT with the head.
    assert expected["norm.weight"] == expected["norm.bias"] == pytest.approx(0.2 * 0.75)
    expected |= {"norm.weight": 0.2, "norm.bias": 0.2}
    assert rates(model, ours) == pytest.approx(expected, rel=1e-12)
    assert rates(model, ours, "weight_decay") == rates(model, theirs, "weight_decay")


def test_an_embedding_is_a_layer_of_its_own_and_the_head_keeps_its_rate() -> None:
    model = classifier()
    scales = learning_rate_scales(adapt(model), 0.5)
    by_part = {
        "bert.embeddings.word_embeddings.weight": 0.125,
        "bert.encoder.layer.0.attention.self.query.weight": 0.25,
        "bert.encoder.layer.1.output.dense.bias": 0.5,
        "bert.pooler.dense.weight": 1.0,
        "classifier.weight": 1.0,
    }
    assert {name: scales[name] for name in by_part} == by_part


def test_children_of_a_sequential_are_a_layer_each() -> None:
    scales = learning_rate_scales(adapt(tiny_model()), 0.5)
    assert scales["0.weight"] == 0.5**5 and scales["1.norm.bias"] == 0.5**4
    assert scales["5.1.weight"] == 1.0


def test_a_rate_that_is_a_tensor_decays_as_a_number() -> None:
    # Each layer lowered the one tensor of all: every rate came out as 0.2 times all factors.
    def adam(named: NamedParameters) -> Optimizer:
        return Adam([p for _, p in named], lr=torch.tensor(0.2, dtype=torch.float64))

    model = tiny_model()
    groups = decay_by_layer(adam, adapt(model), 0.5)(list(model.named_parameters())).param_groups
    assert [float(group["lr"]) for group in groups] == [0.2 * 0.5**n for n in range(6)]


def test_a_part_has_the_rates_of_the_whole_and_the_groups_other_settings() -> None:
    model = tiny_model()
    named = list(model.named_parameters())
    factory = decay_by_layer(
        named_optimizer("sgd", 0.1, weight_decay=0.3, momentum=0.9), adapt(model), 0.75
    )
    whole = factory(named).param_groups
    part = factory(named[7:15]).param_groups
    expected = rates(model, whole)
    for name, rate in rates(model, part).items():
        assert rate == expected[name]
    assert {group["momentum"] for group in whole + part} == {0.9}
    assert rates(model, part).keys() == {name for name, _ in named[7:15]}


def test_a_group_s_own_rate_is_what_is_scaled() -> None:
    model = tiny_model()

    def two_rates(named: Any) -> torch.optim.Optimizer:
        heads = [p for name, p in named if name.startswith("5.")]
        others = [p for name, p in named if not name.startswith("5.")]
        groups = [{"params": heads, "lr": 1.0, "initial_lr": 2.0}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.1)

    groups = decay_by_layer(two_rates, adapt(model), 0.5)(
        list(model.named_parameters())
    ).param_groups
    assert (groups[0]["lr"], groups[0]["initial_lr"]) == (1.0, 2.0)
    assert rates(model, groups)["4.norm.weight"] == pytest.approx(0.05)


def test_what_no_sublayer_reads_keeps_its_rate() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_parameter("unread", nn.Parameter(torch.zeros(2)))
    layered = LayeredModel(
        model,
        [Sublayer("0", 0, model[0]), Sublayer("1", 1, model[1])],
        inputs=("x",),
        targets=("y",),
        unused=("unread",),
    )
    groups = decay_by_layer(adamw(0.1), layered, 0.5)(list(model.named_parameters())).param_groups
    assert rates(model, groups)["unread"] == 0.1

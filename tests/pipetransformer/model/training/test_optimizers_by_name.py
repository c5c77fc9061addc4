"""Optimizers by name group what they are given as people expect, and train anywhere."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from timm.optim import create_optimizer_v2, list_optimizers, param_groups_layer_decay
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import TensorDataset

from pipetransformer import LayeredModel, Sublayer, Trainer, adamw, named_optimizer
from pipetransformer.checks import try_optimizer
from pipetransformer.model import NamedParameters, adapt, decay_by_layer
from pipetransformer.model.training.optimizers import _TORCH, learning_rate_scales
from tests.helpers.adapted import classifier, timm_vit
from tests.helpers.marks import slow
from tests.helpers.models import tiny_model

CPU = torch.device("cpu")


OTHER_PACKAGES = ("bnb", "fused")


TIMM = [
    name
    for name in map(str, list_optimizers())
    if name not in _TORCH and not name.startswith(OTHER_PACKAGES)
]


REFUSED = {
    **dict.fromkeys(("adan", "adanw", "cadan", "cadanw"), "Adan keeps 'step' in its parameter gr"),
    **dict.fromkeys(
        ("lamb", "lambc", "lambcd", "lambcw", "lambw", "clamb", "clambw"),
        "Lamb keeps 'step' in its parameter groups",
    ),
    **dict.fromkeys(("kron", "kronc", "kronw"), "in another way where it does not train"),
    "adahessian": "Adahessian cannot take a step from dense gradients alone",
}
"""What the docstring of `named_optimizer` and the page on optimizers say is refused."""


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def names_of(model: nn.Module, group: dict[str, Any]) -> set[str]:
    found = {parameter: name for name, parameter in model.named_parameters()}
    return {found[parameter] for parameter in group["params"]}


QUICK = ("adamw", "sgd", "adafactor", "lion", "muon", "adan", "lamb", "adahessian")
"""Of each kind of state and of refusal one; Kron compiles, for half a minute."""


@pytest.mark.parametrize("name", [n if n in QUICK else slow(n) for n in (*_TORCH, *TIMM)])
def test_every_name_trains_in_stages_or_is_refused_with_the_reason(name: str) -> None:
    factory = named_optimizer(name, 0.1, weight_decay=0.01)
    model = tiny_model(dtype=torch.float32)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            try_optimizer(factory, model, CPU)
    else:
        assert try_optimizer(factory, model, CPU).peak_learning_rate == pytest.approx(0.1)


@pytest.mark.parametrize(
    "name", ["lion", "muon", "adopt", "nadamw", "adafactorbv", "lars", "madgrad", "sgdw"]
)
def test_a_name_of_timm_s_is_what_timm_builds(name: str) -> None:
    models = [timm_vit(embed_dim=16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    excluded = tuple(models[0].no_weight_decay())
    muon = {"fallback": ()} if name == "muon" else {}
    ours = named_optimizer(name, 0.01, weight_decay=0.1, no_decay=excluded, **muon)(
        named(models[0])
    )
    theirs = create_optimizer_v2(models[1], name, lr=0.01, weight_decay=0.1)
    for step in range(3):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    for (key, one), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, msg=key)


def test_biases_and_norms_do_not_decay_unless_asked() -> None:
    model = timm_vit()
    matrices = {name for name, p in named(model) if p.ndim >= 2}
    others = {name for name, _ in named(model)} - matrices
    decayed, plain = named_optimizer("sgd", 0.1, weight_decay=0.3)(named(model)).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert (names_of(model, decayed), names_of(model, plain)) == (matrices, others)
    (everything,) = named_optimizer("sgd", 0.1, weight_decay=0.3, decay_all=True)(
        named(model)
    ).param_groups
    assert everything["weight_decay"] == 0.3


def test_further_parameters_are_kept_from_decay_by_patterns() -> None:
    model = timm_vit()
    factory = named_optimizer("adamw", 0.1, weight_decay=0.3, no_decay=("pos_*", "cls_token"))
    decayed, plain = factory(named(model)).param_groups
    assert {"pos_embed", "cls_token"} <= names_of(model, plain)
    assert {"head.weight", "patch_embed.proj.weight"} <= names_of(model, decayed)


def test_muon_leaves_embeddings_and_heads_to_adamw() -> None:
    model = timm_vit()
    groups = named_optimizer("muon", 0.1)(named(model)).param_groups
    left = set().union(*(names_of(model, g) for g in groups if g.get("use_fallback")))
    assert {name for name in left if not name.endswith("bias")} == {
        "cls_token", "pos_embed", "patch_embed.proj.weight", "head.weight",
    }  # fmt: skip
    groups = named_optimizer("muon", 0.1, fallback=("blocks.0.*",))(named(model)).param_groups
    left = set().union(*(names_of(model, g) for g in groups if g.get("use_fallback")))
    assert left == {name for name, _ in named(model) if name.startswith("blocks.0.")}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamW8", {}, r"'adamW8' is none of torch's adadelta, .*, and none of timm's .*muon"),
        ("bnbadamw8bit", {}, r"is of another package than timm, and was not tried; give a func"),
        ("adamw", {"beta": 0.9}, r"'adamw' takes no beta; choose of amsgrad, betas, "),
        ("lion", {"momentum": 0.9}, r"'lion' takes no momentum; choose of betas, "),
        ("adamw", {"fallback": ()}, r"'adamw' takes no fallback"),
    ],
)
def test_unknown_names_and_options_are_refused_at_once(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        named_optimizer(name, 0.1, **options)


def test_timm_s_names_say_that_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(ValueError, match=r"'lion' is none of torch's .* not installed: pip inst"):
        named_optimizer("lion", 0.1)
    named_optimizer("adamw", 0.1)


def test_a_name_in_the_place_of_a_factory_is_refused() -> None:
    factory: Any = "adamw"
    with pytest.raises(TypeError, match=r"optimizer= is 'adamw'; give a function .*named_optimiz"):
        try_optimizer(factory, tiny_model(), CPU)


def rates(model: nn.Module, groups: list[dict[str, Any]], key: str = "lr") -> dict[str, Any]:
    """Return the learning rate, or another setting, of every parameter by its name."""
    found = {parameter: name for name, parameter in model.named_parameters()}
    return {found[p]: group[key] for group in groups for p in group["params"]}


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2, "pre_norm": True}])
def test_rates_of_a_vit_are_timm_s_but_for_its_last_norm(options: dict[str, Any]) -> None:
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


def test_a_schedule_multiplies_a_tensor_s_rate_as_it_was_given() -> None:
    def train(rate: float | Tensor) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        data = TensorDataset(torch.randn(24, 4), torch.randint(2, (24,)))
        settings: dict[str, Any] = {
            "loss_fn": nn.CrossEntropyLoss(),
            "optimizer": lambda named: torch.optim.SGD([p for _, p in named], lr=rate),
            "learning_rate_schedule": lambda step, max_steps: 0.5,
            "global_batch_size": 4,
            "epochs": 1,
        }
        with Trainer(model, data, **settings) as trainer:
            trainer.fit()
            return {k: v.clone() for k, v in trainer.state_dict().items()}

    rate = torch.tensor(0.2, dtype=torch.float64)
    torch.testing.assert_close(train(rate), train(0.2))
    assert rate == 0.2

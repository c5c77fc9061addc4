"""Optimizers by name group what they are given as people expect, and train anywhere."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn

from pipetransformer import named_optimizer
from pipetransformer.checks import try_optimizer
from pipetransformer.model.optimizers import _TORCH
from tests.adapted import timm_vit
from tests.marks import slow
from tests.models import tiny_model

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


@pytest.mark.parametrize(
    "name",
    [
        # The first of them compiles, for half a minute.
        slow(name) if name.startswith("kron") else name
        for name in (*_TORCH, *TIMM)
    ],
)
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

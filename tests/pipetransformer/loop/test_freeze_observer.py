"""What an observer shows a policy of the layers, and which policies it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from freeze import FreezeContext, FreezeDecision, PaperRule, QuietUpdates
from pipetransformer.loop.policy.freeze_advice import FreezeAdvice, Look
from pipetransformer.loop.policy.freeze_observer import FreezeObserver
from pipetransformer.loop.policy.step_times import StepCosts
from tests.helpers.freezing import Net


def observer(policy: Any, *, layers: Sequence[nn.Module] | None = None) -> FreezeObserver:
    return FreezeObserver(policy, every_steps=2, dry_run=True, layers=layers)


def watch(model: nn.Module, watching: FreezeObserver, *, decay: float = 0.0) -> tuple[Look, ...]:
    """Train four steps as a loop of one's own does, telling the observer; return its looks."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=decay)
    watching.begin(model, [optimizer], max_steps=4, steps_per_epoch=2)
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.ones(6, 3)).square().mean().backward()
        optimizer.step()
        watching.end_update()
        watching.end_step(step)
    return watching.advice.looks


class Embedded(nn.Module):
    """Two blocks behind an embedding, the first of which has no part in the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        output: torch.Tensor = self.blocks[1](hidden + 0 * self.blocks[0](hidden))
        return output


def test_layer_0_is_looked_at_with_all_that_freezes_with_it() -> None:
    model = Embedded()
    model.blocks[0].requires_grad_(False)
    look = watch(model, observer(QuietUpdates(1e-5, begin=0)))[0]
    assert look.updates[0] is not None and look.updates[0] > 1e-4  # The embedding's.
    assert look.num_frozen == 0


def test_noise_that_ends_where_the_embedding_freezes_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As transformers marks the embedding that NEFTune's noise is added to."""
    for alpha in (None, 5.0):
        model = Embedded()
        model.embedding.neftune_noise_alpha = alpha  # type: ignore[assignment]
        watch(model, observer(QuietUpdates(1e-5, begin=0)))
    told = [one.getMessage() for one in caplog.records if "NEFTune" in one.getMessage()]
    assert len(told) == 1 and "once 'embedding' is frozen" in told[0]


def test_a_layer_that_only_decays_is_not_quiet() -> None:
    model = Embedded()
    model.embedding.requires_grad_(False)
    looks = watch(model, observer(QuietUpdates(1.0, begin=0)), decay=0.1)
    assert [look.updates[0] for look in looks] == [None, None]
    assert all(look.updates[1] and look.num_frozen == 0 for look in looks)


def test_advice_says_what_froze_when_and_what_that_saves() -> None:
    costs = StepCosts(1.0, (0.1,) * 3, (0.2,) * 3, (0.01,) * 3)
    numbers = [(0, 0), (50, 0), (100, 1), (150, 1), (200, 2)]
    looks = tuple(Look(step, number, (None,) * 3, "why") for step, number in numbers)
    when = ": 1 after step 100, 2 after step 200"
    saved = "of 3 layers would have frozen{}. That would save at least 42% of each step, 62%"
    advice = FreezeAdvice(3, True, looks, costs)
    assert str(advice) == f"{saved.format(when)} with rows"
    assert str(FreezeAdvice(3, False, looks, None)) == f"of 3 layers froze{when}"
    thawed = FreezeAdvice(3, False, (*looks, Look(300, 0, (), "why")), costs)
    assert str(thawed) == f"of 3 layers froze{when}, 0 after step 300"
    assert (
        str(FreezeAdvice(3, True, looks[:2], costs))
        == "no layer would have frozen by step 50: why"
    )
    assert str(FreezeAdvice(0, True, (), None)) == "no advice yet: the policy was not asked"


def resting(context: FreezeContext) -> FreezeDecision:
    return FreezeDecision(0, "as LISA does", (1,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FreezeObserver(resting, every_steps=0, dry_run=True),
            "every_steps is 0; give at",
        ),
        (lambda: observer(resting, layers=[]), "layers is empty; give the model's blocks"),
        (lambda: observer(PaperRule(0.5)), "gradient_norm'\\], which are not measured here"),
        (lambda: watch(Net(), observer(resting)), "resting lets layers \\(1,\\) rest"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

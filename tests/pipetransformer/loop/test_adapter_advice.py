"""Where adapters train in all blocks, it is said what it would save to leave lower ones alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import nn

from pipetransformer.loop.policy.adapter_advice import adapter_advice
from pipetransformer.loop.policy.freeze_observer import FreezeObserver
from tests.helpers.any_models import KINDS, build

QWEN = KINDS["qwen3"]
DEEP = replace(QWEN, options={**QWEN.options, "num_hidden_layers": 4})


def adapted(kind: Any = DEEP, **options: Any) -> tuple[nn.Module, list[nn.Module]]:
    model = build(kind)
    blocks = list(model.get_submodule(kind.blocks).children())
    lora = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options})  # type: ignore[arg-type]
    return peft.get_peft_model(model, lora), blocks  # type: ignore[arg-type]


def test_shares_are_those_of_weights_and_of_what_trains() -> None:
    model, blocks = adapted(layers_to_transform=[0, 1, 2, 3])
    # Width 16, two heads of 8, one of keys and values; 24 within; adapters of rank 2; two norms
    # of 16 and two of 8.
    block = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 2 * 16 + 2 * 16 + 2 * 8
    share = 3 * block / (4 * block + 16 * 40 + 16)  # The head, and the last norm.
    text = adapter_advice(model, blocks, 3, caches=True)
    assert "all 4 blocks. Where the lower 3 are frozen, 75% of the adapters' parameters" in text
    assert f"do not learn, and about {share:.0%} of a step's" in text
    assert "layers_to_transform=list(range(3, 4))" in text
    # Without rows they still have a forward.
    assert f"about {share / 2:.0%} of" in adapter_advice(model, blocks, 3, caches=False)


def test_a_tied_head_multiplies_and_an_embedding_does_not() -> None:
    tied = replace(DEEP, options={**DEEP.options, "tie_word_embeddings": True})
    assert adapter_advice(*adapted(tied), 2, caches=True) == adapter_advice(
        *adapted(), 2, caches=True
    )


def test_nothing_is_said_where_lower_blocks_have_no_adapters_or_all_trains() -> None:
    assert not adapter_advice(*adapted(layers_to_transform=[1, 2, 3]), 2, caches=True)
    model = build(DEEP)
    blocks = list(model.get_submodule(DEEP.blocks).children())
    assert not adapter_advice(model, blocks, 2, caches=True)
    model, blocks = adapted()
    blocks[3].requires_grad_(True)  # What is no adapter trains, too.
    assert not adapter_advice(model, blocks, 2, caches=True)


@pytest.mark.parametrize(
    ("freeze", "num"), [(1, 1), ([0, 1, 3], 3), ([0, 1, 1, 3], 1), (0, 2), ("linear", 2)], ids=str
)
def test_an_observer_proposes_what_its_schedule_freezes_or_half(
    freeze: Any, num: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = adapted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    watching = FreezeObserver(freeze, every_steps=None, dry_run=True)
    watching.begin(model, [optimizer], max_steps=6, steps_per_epoch=2)
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(told) == 1 and f"Where the lower {num} are frozen" in told[0]
    watching.publish()

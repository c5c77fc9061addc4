"""Say what it would save to keep adapters out of a model's lower blocks.

LoRA in all blocks      block 0 ... block L-1    each returns something else at every step
in the upper ones       block n ... block L-1    the lower n have rows from the first epoch on
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from freeze.in_place import freezing_with
from pipetransformer.model import adapter_names


def adapter_advice(
    model: nn.Module, blocks: Sequence[nn.Module], num_frozen: int, *, caches: bool
) -> str:
    """Return a sentence about freezing blocks whose adapters train; "" where none do.

    Of what steps cost, only products with weights count, equally in forward and backward.

    Args:
        blocks: the model's row of blocks, bottom first.
        num_frozen: of these.
        caches: whether rows are kept, so that frozen blocks have no forward, either.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    held = [
        sum(p.numel() for p in own.values() if p.requires_grad)
        for own in freezing_with(model, blocks)
    ]
    is_adapted = bool(trained) and trained.keys() <= adapter_names(model)
    if not is_adapted or not all(held) or not 0 < num_frozen < len(blocks):
        return ""
    multiplied = [*map(_num_multiplied, blocks)]
    spared = sum(multiplied[:num_frozen]) / _num_multiplied(model) / (1 if caches else 2)
    stopped = sum(held[:num_frozen]) / sum(p.numel() for p in trained.values())
    return (
        f"adapters lie in all {len(blocks)} blocks. Where the lower {num_frozen} are frozen, "
        f"{stopped:.0%} of the adapters' parameters do not learn, and about {spared:.0%} of a "
        "step's forward and backward is spared, as the weights say. "
        f"layers_to_transform=list(range({num_frozen}, {len(blocks)})) in peft's configuration "
        "leaves these out from the start"
    )


def _num_multiplied(model: nn.Module) -> int:
    """Return how many weights an input is multiplied by; an embedding's are looked up."""
    # A quantized layer's weight has fewer elements than it stands for.
    linear = [one for one in model.modules() if isinstance(one, nn.Linear)]
    others = {
        p: p.numel()
        for one in model.modules()
        if not isinstance(one, (nn.Linear, nn.Embedding))
        for p in one.parameters(recurse=False)
    }
    return sum(one.in_features * one.out_features for one in linear) + sum(others.values())

"""Make sublayers of a model's own forward, cut between its blocks."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from pipetransformer.model.forward import CutForward, beside_blocks, output_of
from pipetransformer.model.layered_model import Sublayer


def cut_sublayers(model: nn.Module, own: CutForward) -> list[Sublayer]:
    """Return the embedding, the blocks and the head of a forward in parts."""
    row = own.row
    sides = tuple(name for name in own.inputs if name not in own.shapes)
    below = beside_blocks(model, row, row.below, row.called_below)
    above = beside_blocks(model, row, row.above, row.called_above)
    learned = beside_blocks(model, row, row.learned, frozenset()) if row.learned else None
    blocks = [
        Sublayer(f"blocks.{i}", i, _Block(own, i, block, learned), sides, block)
        for i, block in enumerate(row.blocks)
    ]
    return [
        Sublayer("embedding", 0, _Below(own, below)),
        *blocks,
        Sublayer("head", len(blocks), _Above(own, above), sides),
    ]


@final
class _Below(nn.Module):
    """Run the forward up to the first block: entries to its hidden state."""

    def __init__(self, own: CutForward, parts: nn.Module) -> None:
        super().__init__()
        self.own, self.parts = own, parts

    def forward(self, first: Tensor, **others: Tensor) -> Tensor:
        entries = {self.own.inputs[0]: first, **others}
        return self.own.below(entries, training=self.training)


@final
class _Block(nn.Module):
    """Run a block with what the forward gives it: hidden state to hidden state."""

    def __init__(
        self, own: CutForward, index: int, block: nn.Module, learned: nn.Module | None
    ) -> None:
        super().__init__()
        self.own, self.index, self.block, self.learned = own, index, block, learned

    def forward(self, hidden: Tensor, **entries: Tensor) -> Tensor:
        return self.own.block(self.index, hidden, entries, training=self.training)


@final
class _Above(nn.Module):
    """Run the forward behind the last block: hidden state to output."""

    def __init__(self, own: CutForward, parts: nn.Module) -> None:
        super().__init__()
        self.own, self.parts = own, parts

    def forward(self, hidden: Tensor, *, headless: bool = False, **entries: Tensor) -> Tensor:
        if headless:
            return self.own.headless(hidden, entries, training=self.training)
        return output_of(self.own.above(hidden, entries, training=self.training))

"""Prove in which mode the modules of a model run that is frozen in place, and once it thaws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from freeze import apply
from tests.helpers.freezing import Block, Net, same, state


class Listed(nn.Module):
    """Call the members of blocks that are lists, and of a dictionary before them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"first": Block()})
        self.layers = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed["first"](x)
        for pair in self.layers:
            assert isinstance(pair, nn.ModuleList)
            for part in pair:
                x = part(x)
        return x


def test_members_of_frozen_lists_stay_in_eval_mode() -> None:
    model = Listed()
    apply(model, 2)
    before = [state(part) for part in (model.embed, *model.layers)]
    model.train()
    model(torch.randn(5, 4))
    after = [state(part) for part in (model.embed, *model.layers)]
    assert [same(*pair) for pair in zip(before, after, strict=True)] == [True, True, True, False]
    called = [part for one in (*model.layers[:2], model.embed) for part in one.children()]
    assert not any(one.training for part in called for one in part.modules())


def test_a_frozen_block_s_own_hooks_find_it_in_eval_mode() -> None:
    def block() -> nn.Module:
        return nn.utils.spectral_norm(nn.Linear(4, 4))

    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(block(), block()))
    apply(model, 1)
    before = [state(one) for one in model[1]]
    model.train()
    model(torch.randn(5, 3))
    after = [state(one) for one in model[1]]
    assert [same(*pair) for pair in zip(before, after, strict=True)] == [True, False]


def test_a_part_whose_mode_is_read_by_its_owner_alone_is_in_eval_mode() -> None:
    class Reader(Block):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(self.dropout.training)
            return x

    modes: list[bool] = []
    model = nn.Sequential(Reader(), Reader())
    apply(model, 1, layers=list(model))
    model.train()
    model(torch.ones(2, 4))
    assert modes == [False, True]


def test_a_thaw_gives_back_the_modes_that_were_there() -> None:
    model = Net()
    model.blocks[0].norm.eval()
    before = [module.training for module in model.modules()]
    apply(model, 3)
    model.eval()
    model.train()
    model(torch.ones(6, 3))
    apply(model, 0)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("mode", [False, True])
def test_a_thaw_gives_the_mode_that_the_model_took_meanwhile(mode: bool) -> None:
    model = Net()
    model.train(not mode)
    apply(model, 2)
    model.train(mode)
    apply(model, 0)
    assert all(module.training is mode for module in model.modules())


def test_a_part_shared_with_a_layer_that_trains_stays_in_its_mode() -> None:
    model = Net()
    model.blocks[0].shared = model.blocks[3].shared = Block()
    model.blocks[1].dropout = model.blocks[3].dropout
    for own, other in zip(model.blocks[2].modules(), model.blocks[3].modules(), strict=False):
        own._parameters.update(other._parameters)
    names = apply(model, 3)
    modes = [[one.training for one in block.modules()] for block in model.blocks]
    assert modes[0] == [False, False, False, False, True, True, True, True]
    assert modes[1] == [False, False, False, True]
    assert all(modes[2]) and all(modes[3])
    assert not any("shared" in name or name.startswith("blocks.2") for name in names)

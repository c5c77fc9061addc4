"""Prove that freezing in place holds in any loop: modes, optimizers, thaws, ties and wrappers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from freeze import apply, find_layers


class Block(nn.Module):
    """Transform with dropout and running statistics, so that modes show."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.norm(self.linear(x)))
        return out


class Net(nn.Module):
    """Stack blocks between an embedding and a head."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.shift
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a training step, as a loop that knows nothing of freezing does."""
    model.train()
    optimizer.zero_grad()
    model(torch.ones(6, 3)).square().mean().backward()
    optimizer.step()


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_frozen_layers_stay_bit_for_bit_and_the_others_learn(momentum: float) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.1)
    step(model, optimizer)
    names = apply(model, 2)
    assert "shift" in names and "embed.weight" in names and "blocks.1.norm.bias" in names
    assert not any(name.startswith(("blocks.2", "blocks.3", "head")) for name in names)
    frozen = [state(part) for part in (model.embed, *model.blocks[:2])]
    above, kept = state(model.blocks[2]), copy.deepcopy(optimizer.state_dict()["state"])
    for _ in range(3):
        step(model, optimizer)
    assert all(map(same, frozen, [state(part) for part in (model.embed, *model.blocks[:2])]))
    assert not same(above, state(model.blocks[2]))
    if momentum:
        entries = optimizer.state_dict()["state"]
        assert torch.equal(entries[0]["momentum_buffer"], kept[0]["momentum_buffer"])


def test_frozen_modules_stay_in_eval_mode_through_train() -> None:
    model = Net()
    apply(model, 2)
    model.train()
    model(torch.ones(6, 3))
    assert not any(part.training for block in model.blocks[:2] for part in block.modules())
    assert model.blocks[2].dropout.training and model.training
    assert not model.embed.training


def test_a_thaw_restores_what_trained_before_and_nothing_else() -> None:
    model = Net()
    model.blocks[0].linear.bias.requires_grad_(False)
    apply(model, 3)
    assert apply(model, 1) == apply(model, 1)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"blocks.1.linear.bias", "blocks.2.linear.weight"} <= trains
    assert not any(name.startswith("blocks.0") for name in trains)
    assert apply(model, 0) == ()
    fixed = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert fixed == ["blocks.0.linear.bias"]
    model.train()
    model(torch.ones(6, 3))
    assert all(module.training for module in model.modules())


def test_a_twin_is_not_thawed_by_its_original() -> None:
    model = Net()
    apply(model, 2)
    twin = copy.deepcopy(model)
    apply(model, 0)
    twin.train()
    twin(torch.ones(6, 3))
    assert not twin.blocks[0].linear.weight.requires_grad and not twin.blocks[0].training
    apply(twin, 0)
    twin.train()
    twin(torch.ones(6, 3))
    assert all(p.requires_grad for p in twin.parameters()) and twin.blocks[0].training


def test_weights_load_into_a_frozen_model() -> None:
    model, other = Net(), Net()
    apply(model, 2)
    model.load_state_dict(other.state_dict())
    assert same(state(model), state(other)) and not model.embed.weight.requires_grad


def test_a_tied_embedding_goes_on_training() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=11))
    names = apply(model, 1)
    assert model.transformer.wte.weight.requires_grad
    assert "transformer.wpe.weight" in names
    assert not model.transformer.h[0].mlp.c_fc.weight.requires_grad


def test_blocks_are_found_in_models_of_transformers() -> None:
    config = BertConfig(num_hidden_layers=3, hidden_size=8, num_attention_heads=2, vocab_size=11)
    model = BertForSequenceClassification(config)
    assert find_layers(model) == list(model.bert.encoder.layer)
    names = apply(model, 3)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trains == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "classifier.weight",
        "classifier.bias",
    }
    assert len(names) + len(trains) == len(list(model.parameters()))


def test_scaled_gradients_of_frozen_layers_are_left_out() -> None:
    model = Net()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    apply(model, 2)
    before = state(model.blocks[1])
    model.train()
    scaler.scale(model(torch.ones(6, 3)).square().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert same(before, state(model.blocks[1]))


def test_a_compiled_model_trains_what_was_thawed() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    apply(model, 3)
    compiled(torch.ones(6, 3)).sum().backward()
    assert model.blocks[2].linear.weight.grad is None
    apply(model, 0)
    compiled(torch.ones(6, 3)).sum().backward()
    assert model.blocks[2].linear.weight.grad is not None


@pytest.mark.parametrize("num_frozen", [-1, 5])
def test_layers_that_there_are_not_are_refused(num_frozen: int) -> None:
    with pytest.raises(ValueError, match="the model has 4: give 0 to 4"):
        apply(Net(), num_frozen)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no list of equal blocks; give layers="):
        apply(nn.Linear(2, 2), 1)


def test_a_wrapped_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = Net()
    with pytest.raises(ValueError, match="freeze model.module, and wrap that anew"):
        apply(wrapped, 1)

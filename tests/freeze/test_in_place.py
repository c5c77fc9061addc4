"""Prove that freezing in place holds in any loop: modes, optimizers, thaws, ties and wrappers."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from freeze import QuietUpdates, apply, find_layers
from freeze.in_place import frozen_in_place, list_before, thawed_by
from pipetransformer.loop.policy.freeze_observer import FreezeObserver
from tests.helpers.freezing import Block, Net, same, state
from tests.helpers.pool import Pool


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a training step, as a loop that knows nothing of freezing does."""
    model.train()
    optimizer.zero_grad()
    model(torch.ones(6, 3)).square().mean().backward()
    optimizer.step()


def frozen(parameter: nn.Parameter) -> bool:
    return not parameter.requires_grad


def compiled(module: nn.Module) -> nn.Module:
    wrapper = torch.compile(module, backend="eager")
    assert isinstance(wrapper, nn.Module)
    return wrapper


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


@pytest.mark.parametrize("wrap", [compiled, lambda model: nn.Sequential(model)])
def test_a_thaw_does_not_depend_on_the_wrapper(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Net()
    model.embed.bias.requires_grad_(False)
    wrapper = wrap(model)
    apply(wrapper, 2)
    assert apply(model, 2) == tuple(n for n, p in sorted(model.named_parameters()) if frozen(p))
    assert not any(map(frozen, model.blocks[2].parameters()))
    assert apply(model, 0) == ()
    assert [name for name, p in model.named_parameters() if frozen(p)] == ["embed.bias"]
    apply(model, 3)
    apply(wrapper, 1)
    assert not any(map(frozen, model.blocks[1].parameters()))
    assert all(map(frozen, model.blocks[0].parameters()))


def test_blocks_that_were_compiled_while_frozen_thaw() -> None:
    model = Net()
    apply(model, 2)
    for index, block in enumerate(list(model.blocks)):
        model.blocks[index] = compiled(block)
    apply(model, 1)
    assert all(map(frozen, model.blocks[0].parameters()))
    assert not any(map(frozen, model.blocks[1].parameters()))
    apply(model, 0)
    assert not any(map(frozen, model.parameters()))
    assert all(module.training for module in model.modules())


def test_names_are_also_of_what_its_user_froze_within_the_frozen_layers() -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    model.blocks[3].requires_grad_(False)
    names = apply(model, 1)
    assert {f"blocks.0.{name}" for name, _ in model.blocks[0].named_parameters()} <= set(names)
    assert not any(name.startswith("blocks.3") for name in names)


REFUSED: dict[str, tuple[Callable[[Net], list[nn.Module]], str]] = {
    "reversed": (lambda net: list(net.blocks)[::-1], "layer 1, of Block, is not .*behind layer 0"),
    "twice": (lambda net: [net.blocks[0]] * 2, "layer 1, of Block, is not .*behind layer 0"),
    "nested": (lambda net: [net.blocks, net.blocks[1]], "layer 1, .* is not .*behind layer 0"),
    "foreign": (lambda net: [net.blocks[0], Block()], "layer 1, .* is not registered in the mod"),
    "the model": (lambda net: [net], "layer 0, of Net, is not registered in the model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_are_not_one_behind_the_other_are_refused(case: str) -> None:
    model = Net()
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        apply(model, 1, layers=make(model))
    assert not any(map(frozen, model.parameters()))
    assert all(module.training for module in model.modules())


def test_a_block_without_parameters_may_freeze() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert apply(model, 1, layers=list(model)) == () and not model[0].training
    assert apply(model, 2, layers=list(model)) == ("1.bias", "1.weight")


def test_an_encoder_before_the_decoder_is_refused_unless_layers_are_given() -> None:
    shape = {
        f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "ffn_dim")
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=11, d_model=8, max_position_embeddings=8, **shape, **heads)
    model = BartForConditionalGeneration(config)
    with pytest.raises(ValueError, match="encoder.layers' lies before .*give layers=, bottom"):
        apply(model, 1)
    assert not any(map(frozen, model.parameters()))
    names = apply(model, 1, layers=[*model.model.encoder.layers, *model.model.decoder.layers])
    assert any(name.startswith("model.encoder.layers.0.") for name in names)
    assert not any(name.startswith(("model.encoder.layers.1", "model.decoder")) for name in names)


def test_the_parts_of_layers_of_two_classes_are_not_taken_for_the_layers() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    class Other(Mixture): ...

    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(Mixture(), Other()), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="'1.0.experts' and '1.1.experts' are equally large"):
        apply(model, 1)
    assert set(apply(model, 1, layers=list(model[1]))) == {
        name for name, _ in model.named_parameters() if name.startswith(("0.", "1.0."))
    }


def test_lists_within_and_behind_the_blocks_are_no_others() -> None:
    stages = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)))
    activations = nn.Sequential(nn.ReLU(), nn.ReLU())
    heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    model = nn.ModuleDict({"in": activations, "body": stages, "heads": heads})
    assert find_layers(model) == list(stages)


def test_a_block_used_several_times_trains_in_its_mode_until_all_uses_freeze() -> None:
    block = Block()
    model = nn.Sequential(nn.Linear(3, 4), nn.ModuleList([block] * 3), nn.Linear(4, 2))
    assert apply(model, 2) == ("0.bias", "0.weight")
    assert all(one.training for one in block.modules()) and not model[0].training
    assert set(apply(model, 3)) == {n for n, _ in model.named_parameters() if n[0] in "01"}
    assert not any(one.training for one in block.modules())


def test_the_scaled_step_of_a_fully_frozen_optimizer_is_left_out() -> None:
    model = Net()
    scaler = torch.amp.GradScaler("cpu")
    below = torch.optim.SGD([*model.embed.parameters(), *model.blocks.parameters()], lr=0.1)
    above = torch.optim.SGD(model.head.parameters(), lr=0.1)
    apply(model, 4)
    head = state(model.head)
    scaler.scale(model(torch.ones(6, 3)).square().mean()).backward()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(below)
    scaler.step(above)
    scaler.update()
    assert not same(head, state(model.head))


@pytest.mark.parametrize("num_frozen", [-1, 5, 1.5, True])
def test_layers_that_there_are_not_are_refused(num_frozen: float) -> None:
    message = r"the model has 4: give 0 to 4|is \S+ \(\w+\); give how many layers freeze"
    with pytest.raises((ValueError, TypeError), match=message):
        apply(Net(), num_frozen)  # type: ignore[arg-type]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no list of equal blocks; give layers="):
        apply(nn.Linear(2, 2), 1)


def test_a_wrapped_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = Net()
    with pytest.raises(ValueError, match="freeze model.module, and wrap that anew"):
        apply(wrapped, 1)


def freeze_sharded(kind: str) -> list[str]:
    """Freeze a sharded model for two steps; return what differs from a plain one, or why not."""
    torch.manual_seed(7)
    model = plain_stack()
    expected = copy.deepcopy(model)
    if kind == "FSDP2":
        wrapped: nn.Module = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=kind == "FSDP1", device_id=torch.device("cpu")
        )
    try:
        names = apply(wrapped, 1, layers=list(model[1]))
    except ValueError as refusal:
        return [str(refusal)]
    assert len(names) == 4
    apply(expected, 1)
    for one in (wrapped, expected):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(2):
            step(one, optimizer)
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped):
            found = {n: p.detach().clone() for n, p in model.named_parameters()}
    else:
        found = {n: p.full_tensor() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    pairs = zip(found.items(), expected.parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.allclose(p, q, atol=1e-6)]


def plain_stack() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(*blocks), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", ["FSDP1", "FSDP2"])
def test_sharded_layers_freeze_as_plain_ones(two_ranks: Pool, kind: str) -> None:
    assert two_ranks.run(freeze_sharded, kind) == [[], []]


def freeze_behind_evaluation() -> list[bool]:
    """Freeze a model whose root is gathered still; return whether frozen weights stayed."""
    torch.manual_seed(7)
    model: Any = plain_stack()
    for block in model[1]:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.ones(2, 3))
    apply(model, 1, layers=list(model[1]))
    model.reshard()
    before = [p.full_tensor() for p in (model[0].weight, model[2].weight)]
    for _ in range(2):
        step(model, optimizer)
    pairs = zip(before, (model[0].weight, model[2].weight), strict=True)
    return [torch.equal(one, p.full_tensor()) for one, p in pairs]


def test_a_root_that_an_evaluation_has_left_gathered_freezes(two_ranks: Pool) -> None:
    """Its gathered parameters froze, and went with the next step: the embedding trained on."""
    assert two_ranks.run(freeze_behind_evaluation) == [[True, False]] * 2


def test_flattened_layers_are_refused(two_ranks: Pool) -> None:
    """The head froze with the block: one parameter held both."""
    for (refusal,) in two_ranks.run(freeze_sharded, "flattened"):
        assert "has flattened: all would freeze, or none" in refusal
        assert "use_orig_params=True" in refusal and "fully_shard (FSDP2)" in refusal


def observe_flattened() -> str:
    """Begin to watch a model whose layers are one parameter."""
    wrapped = FullyShardedDataParallel(plain_stack(), device_id=torch.device("cpu"))
    try:
        layers = list(wrapped.module[1])
        watching = FreezeObserver(QuietUpdates(), every_steps=9, dry_run=True, layers=layers)
        watching.begin(wrapped, [], max_steps=9, steps_per_epoch=3)
    except ValueError as refusal:
        return str(refusal)
    return ""


def test_flattened_layers_are_not_watched_as_if_they_were_apart(two_ranks: Pool) -> None:
    for refusal in two_ranks.run(observe_flattened):
        assert "has flattened" in refusal


def test_it_is_known_what_was_frozen_here_and_what_would_thaw() -> None:
    model = Net()
    model.blocks[1].norm.requires_grad_(False)  # By the user: it never thaws.
    frozen = set(apply(model, 2)) - {"blocks.1.norm.weight", "blocks.1.norm.bias"}
    assert {*frozen_in_place(model)} == frozen
    blocks = list(model.blocks)
    assert {*thawed_by(model, 0, layers=blocks)} == frozen
    assert {*thawed_by(model, 1, layers=blocks)} == {
        "blocks.1.linear.weight",
        "blocks.1.linear.bias",
    }
    assert not thawed_by(model, 2, layers=blocks) and not thawed_by(model, 4, layers=blocks)
    model.blocks[0].requires_grad_(True)
    assert not any(name.startswith("blocks.0.") for name in frozen_in_place(model))


def test_a_list_of_blocks_before_the_layers_is_known() -> None:
    model = nn.Module()
    model.stem = nn.Sequential(nn.ReLU(), nn.ReLU())  # Without weights.
    model.encoder = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    model.decoder = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    assert list_before(model, list(model.decoder)) == "encoder"
    assert list_before(model, list(model.encoder)) is None
    assert list_before(model, [*model.encoder, *model.decoder]) is None
    with pytest.raises(ValueError, match="'encoder' lies before 'decoder'"):
        find_layers(
            nn.ModuleDict({"encoder": nn.ModuleList([Block(), Block()]), "decoder": model.decoder})
        )


@pytest.mark.slow
def test_freezing_imports_no_compiler() -> None:
    """Torch's compiler takes seconds to import, which were the first freeze's."""
    program = (
        "import sys, freeze; from torch import nn; "
        "model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))); "
        "freeze.apply(model, 1, layers=list(model)); freeze.apply(model, 0, layers=list(model)); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_frozen_adapters_stay_frozen_where_peft_switches_them_off_and_on() -> None:
    """peft has all adapters train whenever it switches them on, as TRL's DPO does in each step."""
    base = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))
    lora = peft.LoraConfig(r=2, target_modules=r"blocks\.\d\.0", init_lora_weights=False)  # type: ignore[arg-type]
    model: Any = peft.get_peft_model(nn.ModuleDict({"blocks": base}), lora)
    blocks = list(model.base_model.model["blocks"])
    apply(model, 2, layers=blocks)
    for _ in range(2):
        with model.disable_adapter():
            pass
        assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)
        hidden = torch.ones(1, 4)
        for block in blocks:
            hidden = block(hidden)
        trains = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trains and all("blocks.2." in name for name in trains)
    apply(model, 0, layers=blocks)
    assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)

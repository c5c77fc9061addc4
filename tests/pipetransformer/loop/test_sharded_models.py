"""Loops of models that `fully_shard` (FSDP2) has parted, with rows and without, on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import freeze as freezing
from pipetransformer import FreezeCallback, attach
from tests.helpers.marks import slow
from tests.helpers.pool import Pool

NUM_SAMPLES, LENGTH = 11, 6


@dataclass
class Run:
    """Hold what a rank's loop came to; counts are by epoch and block."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    hits: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)
    gathered: list[list[int]] = field(default_factory=list)
    ran: list[list[int]] = field(default_factory=list)


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=8, intermediate_size=12, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=21, **settings,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def texts() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    rows = torch.randint(0, 21, (NUM_SAMPLES, LENGTH))
    return [{"input_ids": one, "labels": one.clone()} for one in rows]


def shard(model: Any, case: str) -> list[nn.Module]:
    """Make units of a model's blocks, and one of the rest; return the blocks."""
    mesh = init_device_mesh("cpu", (2,))
    blocks, how = [*model.get_decoder().layers], dict[str, Any]()
    if case == "bf16":
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if case == "several blocks a unit":
        fully_shard(blocks[1:3], mesh=mesh)
    if case == "units within blocks":
        for block in blocks:
            fully_shard(block.mlp, mesh=mesh)
    if case == "the embedding's own unit":
        fully_shard(model.model.embed_tokens, mesh=mesh)
    for index, block in enumerate(blocks):
        if case != "several blocks a unit" or index in (0, 3):
            fully_shard(block, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    if case == "prefetched units":
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index])
        model.set_modules_to_forward_prefetch(blocks[:2])
    return blocks


@contextmanager
def counted(blocks: list[nn.Module]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield how often each block's weights were gathered, and how often it ran."""
    gathered, ran = [0] * len(blocks), [0] * len(blocks)
    attentions, gather = [block.self_attn for block in blocks], groups.foreach_all_gather
    weights = [{*map(id, block.modules())} for block in blocks]

    def note(module: nn.Module, *_: Any) -> None:
        if module in attentions:
            ran[attentions.index(module)] += 1

    def gathering(own: Any, *args: Any, **kwargs: Any) -> Any:
        for index, modules in enumerate(weights):
            gathered[index] += any(id(p._module_info.module) in modules for p in own)
        return gather(own, *args, **kwargs)

    hook, groups.foreach_all_gather = register_module_forward_hook(note), gathering
    try:
        yield gathered, ran
    finally:
        hook.remove()
        groups.foreach_all_gather = gather


def begin_epoch(case: str, epoch: int, loader: Any, blocks: list[nn.Module]) -> None:
    """Do to a loop between epochs, on one rank, what has rows be of no use."""
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)
    if epoch < 2 or torch.distributed.get_rank() == 0:
        return
    if case == "a label corrected on one rank":
        for sample in loader.dataset:
            sample["labels"][3] = 7
    if case == "weights edited on one rank without a trace":
        weight: Any = blocks[0].get_parameter("mlp.up_proj.weight")
        weight.to_local().data.mul_(1.5)


def begin_step(case: str, epoch: int, step: int, blocks: list[nn.Module], batch: Any) -> None:
    """Do so within an epoch."""
    if case == "edited weights" and (epoch, step) == (2, 1):
        with torch.no_grad():
            blocks[0].get_parameter("mlp.up_proj.weight").mul_(1.5)
    if case == "a part edited on one rank" and (epoch, step) == (2, 1):
        if torch.distributed.get_rank():
            with torch.no_grad():
                part: Any = blocks[0].get_parameter("mlp.up_proj.weight")
                part.to_local().mul_(1.5)
    if case == "a batch changed on one rank" and step == 1 and torch.distributed.get_rank():
        batch["input_ids"] = torch.where(torch.arange(LENGTH) == 2, 3, batch["input_ids"])


def train_step(case: str, step: int, model: Any, optimizer: Any, batch: Any) -> float:
    loss = model(**batch).loss
    if case == "accumulation":
        model.set_requires_gradient_sync(step % 2 == 1)
    loss.backward()
    if case != "accumulation" or step % 2:
        optimizer.step()
        optimizer.zero_grad()
    if case == "a checkpoint within the epoch":
        model.state_dict()
    return float(loss.item())


def loader_of(case: str, dataset: Any) -> DataLoader[Any]:
    rank = torch.distributed.get_rank()
    sampler: Any = DistributedSampler(dataset, 2, rank, shuffle=True, seed=1)
    if case == "a last batch smaller on one rank":
        sampler = range(rank, NUM_SAMPLES - 1 + rank, 2)
        sampler = [*sampler, NUM_SAMPLES - 1] if rank else [*sampler]
    return DataLoader(dataset, batch_size=2, sampler=sampler)


def built(case: str) -> Any:
    model = llama(tie_word_embeddings=False)
    if case != "adapters beside frozen weights":
        return model
    peft: Any = pytest.importorskip("peft")
    own = peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[2, 3])
    return peft.get_peft_model(model, own).double()


def loop(case: str, plan: tuple[int, ...], folder: Path | None) -> Run:
    """Train on this rank, with rows in a folder or without."""
    model, dataset, found = built(case), texts(), Run()
    dataset *= 6 if case == "edited for an evaluation and a while" else 1  # Not all at once.
    blocks, loader = shard(model, case), loader_of(case, dataset)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    limit = {"cache_limit_bytes": 2500} if case == "rows of some samples alone" else {}
    cached = attach(model, freeze=plan, cache_folder=folder, **limit) if folder else None
    for epoch, num_frozen in enumerate(plan):
        if cached is None:
            freezing.apply(model, num_frozen, layers=blocks)
        begin_epoch(case, epoch, loader, blocks)
        with counted(blocks) as (gathered, ran):
            for step, batch in enumerate(cached.epoch(loader) if cached else loader):
                if step == 0:  # Behind looks at the model.
                    ran[:] = [0] * len(ran)
                begin_step(case, epoch, step, blocks, batch)
                if case == "edited for an evaluation and a while" and epoch == 0:
                    found.losses += edited_a_while(step, len(loader), model, cached, dataset[:4])
                found.losses.append(train_step(case, step, model, optimizer, batch))
        found.gathered.append(gathered)
        found.ran.append(ran)
        found.hits.append(cached.stats.hits if cached else 0)
        found.misses.append(cached.stats.misses if cached else 0)
        if case == "evaluations":
            found.losses += evaluated(model, cached, dataset[:4])
    if cached is not None:
        cached.close()
    found.weights = whole_weights(model)
    return found


def edited_a_while(step: int, num: int, model: Any, cached: Any, dataset: Any) -> list[float]:
    """Double a frozen weight from an epoch's first step to its last, and evaluate with it."""
    if step not in (0, num - 1):
        return []
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(0.5 if step else 2)
    return [] if step else evaluated(model, cached, dataset)


def evaluated(model: Any, cached: Any, dataset: Any) -> list[float]:
    held = DataLoader(dataset, batch_size=2)
    model.eval()
    with torch.no_grad():
        batches = [held] if cached is None else [held, cached.evaluation(held)]
        losses = [[model(**batch).loss.item() for batch in one] for one in batches]
    model.train()
    assert losses[0] == losses[-1]
    return losses[-1]


def whole_weights(model: Any) -> dict[str, Tensor]:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}


def assert_as_without(pool: Pool, case: str, plan: tuple[int, ...], folder: Path) -> list[Run]:
    """Compare both ranks' losses, and all whole weights; return what ours came to."""
    ours, plain = pool.run(loop, case, plan, folder), pool.run(loop, case, plan, None)
    for own, other in zip(ours, plain, strict=True):
        assert own.losses == pytest.approx(other.losses, rel=1e-9, abs=0)
        assert own.weights.keys() == other.weights.keys() and own.weights
        for name, tensor in own.weights.items():
            torch.testing.assert_close(tensor, other.weights[name], rtol=1e-9, atol=1e-12)
    found: list[Run] = ours
    return found


def test_blocks_from_rows_are_neither_gathered_nor_run(two_ranks: Pool, tmp_path: Path) -> None:
    case = "a last batch smaller on one rank"
    for rank, run in enumerate(assert_as_without(two_ranks, case, (2, 2, 0, 2), tmp_path)):
        assert run.misses[0] > 0 == run.misses[1]
        assert run.hits[1] == NUM_SAMPLES // 2 + rank
        for epoch in (0, 1, 3):
            assert run.gathered[epoch][:2] == [0, 0] and min(run.gathered[epoch][2:]) > 0
        assert min(run.gathered[2]) > 0 and min(run.ran[2]) == 3
        assert run.ran[1] == [0, 0, 3, 3]


@pytest.mark.parametrize(
    ("case", "is_last_served"),
    [
        slow("units within blocks", True),
        slow("the embedding's own unit", True),
        slow("prefetched units", True),
        slow("bf16", True),
        slow("adapters beside frozen weights", True),
        slow("accumulation", True),
        slow("a checkpoint within the epoch", True),
        slow("evaluations", True),
        slow("rows of some samples alone", True),
        slow("a label corrected on one rank", True),
        slow("weights edited on one rank without a trace", True),
        slow("edited weights", False),
        slow("a part edited on one rank", False),
        slow("a batch changed on one rank", False),
    ],
)
def test_rows_change_no_number(
    case: str, is_last_served: bool, two_ranks: Pool, tmp_path: Path
) -> None:
    for run in assert_as_without(two_ranks, case, (2, 2, 2), tmp_path):
        assert max(run.hits[1:]) > 0
        assert case != "rows of some samples alone" or min(run.misses) > 0
        if case != "evaluations":  # Half of these have no rows.
            assert (run.gathered[2][:2] == [0, 0]) == is_last_served
            assert (run.ran[2][0] == 0) == is_last_served or run.misses[2] > 0


@pytest.mark.slow
def test_no_row_of_weights_that_were_others_for_a_while_is_read(
    two_ranks: Pool, tmp_path: Path
) -> None:
    assert_as_without(two_ranks, "edited for an evaluation and a while", (2, 2), tmp_path)


@pytest.mark.parametrize("case", ["blocks thaw", slow("evaluations")])
def test_no_row_is_of_copies_from_before_a_thaw(
    case: str, two_ranks: Pool, tmp_path: Path
) -> None:
    for run in assert_as_without(two_ranks, case, (2, 0, 2), tmp_path):
        assert run.misses[0] > 0 < run.misses[2]


@pytest.mark.slow
def test_a_unit_that_a_training_block_shares_is_gathered(two_ranks: Pool, tmp_path: Path) -> None:
    case = "several blocks a unit"
    for run in assert_as_without(two_ranks, case, (1, 2, 2, 3, 3), tmp_path):
        assert run.ran[2] == [0, 0, 3, 3] and run.gathered[2][0] == 0 < run.gathered[2][1]
        assert run.ran[4] == [0, 0, 0, 3] and run.gathered[4][:3] == [0, 0, 0]


class OnCPU(Trainer):
    """Have accelerate shard on CPUs, where it does not by itself."""

    def create_accelerator_and_postprocess(self) -> None:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()


def by_trainer(folder: Path, caches: bool) -> Run:
    """Train by transformers' Trainer, whose accelerate shards the model."""
    AcceleratorState._reset_state(reset_partial_state=True)
    found, model = Run(), llama(tie_word_embeddings=False)
    arguments = TrainingArguments(
        str(folder / "out"), use_cpu=True, per_device_train_batch_size=2, num_train_epochs=3,
        report_to=[], save_strategy="no", eval_strategy="epoch", disable_tqdm=True,
        logging_steps=1, gradient_accumulation_steps=2, fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )  # fmt: skip
    kept: dict[str, Any] = {"cache_folder": folder} if caches else {"cache": False}
    callback = FreezeCallback(freeze=[0, 2, 2], **kept)
    dataset = texts()
    trainer = OnCPU(
        model, arguments, train_dataset=dataset, eval_dataset=dataset[:4], callbacks=[callback]
    )
    try:
        with counted([*model.model.layers]) as (gathered, _):
            trainer.train()
        log = trainer.state.log_history
        found.losses = [one[key] for one in log for key in ("loss", "eval_loss") if key in one]
        found.weights = whole_weights(trainer.model)
        found.hits, found.gathered = [callback.stats.hits], [gathered]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return found


@pytest.mark.slow
def test_the_callback_serves_what_accelerate_shards(two_ranks: Pool, tmp_path: Path) -> None:
    ours, plain = (two_ranks.run(by_trainer, tmp_path, caches) for caches in (True, False))
    for own, other in zip(ours, plain, strict=True):
        assert own.hits[0] >= NUM_SAMPLES // 2 and len(own.losses) == 9
        assert own.losses == pytest.approx(other.losses, rel=1e-9, abs=0)
        assert own.gathered[0][0] < other.gathered[0][0]
        for name, tensor in own.weights.items():
            torch.testing.assert_close(tensor, other.weights[name], rtol=1e-9, atol=1e-12)


def refused(kind: str, settings: dict[str, Any], folder: Path) -> str:
    """Return why an epoch of a parted model does not begin."""
    model: Any = llama(tie_word_embeddings=False)
    if kind == "FSDP1":
        model.model.layers[3] = FullyShardedDataParallel(
            model.model.layers[3], use_orig_params=True, device_id=torch.device("cpu")
        )
    else:
        shard(model, kind)
    try:
        with attach(model, cache_folder=folder, **settings) as cached:
            next(cached.epoch(DataLoader(texts(), batch_size=2)))  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return ""


def test_what_cannot_be_served_of_a_parted_model_is_refused(
    two_ranks: Pool, tmp_path: Path
) -> None:
    for kind, settings, message in (
        ("FSDP1", {"freeze": 2}, "FullyShardedDataParallel (FSDP1) gathers a block's weights"),
        ("", {"freeze": 2, "cache_keep": True}, "fully_shard (FSDP2) cache_keep= is not served"),
        ("", {"freeze": 2, "cache_dtype": "float16"}, "cache_dtype= is not served"),
        ("", {"parts": ["model.embed_tokens"]}, "parts= is not served"),
    ):
        for answer in two_ranks.run(refused, kind, settings, tmp_path):
            assert message in answer

"""A callback serves rows in transformers' Trainer: numbers are those of freezing without rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from freeze import FreezeContext
from pipetransformer import FreezeCallback
from tests.helpers.any_models import KINDS, Kind, build, data
from tests.helpers.marks import slow
from tests.helpers.pool import Pool
from tests.pipetransformer.loop.test_cached_loop import Samples

TEXTS, IMAGES = KINDS["gpt2_classifier"], KINDS["beit"]
BY_EPOCH = (0, 2, 1, 2)
BY_STEP = (0, 0, 2, 2, 1, 2, 0, 0, 2, 2, 2, 1, 2)
"""Blocks by step: with five steps an epoch, most changes are within one."""


def by_step(context: FreezeContext) -> int:
    return BY_STEP[min(context.step, len(BY_STEP) - 1)]


@dataclass
class Training:
    """Train a tiny model by transformers' Trainer, and note each forward's loss."""

    folder: Path
    kind: Kind = TEXTS
    dataset: Any = None
    change: Callable[[nn.Module], nn.Module] = lambda model: model
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.change(build(self.kind))
        self.model.register_forward_hook(self._note)
        if self.dataset is None:
            self.dataset = Samples(dict(data(self.kind).tensors))

    @property
    def blocks(self) -> str:
        around = "base_model.model." if isinstance(self.model, peft.PeftModel) else ""
        return around + self.kind.blocks

    def _note(self, model: nn.Module, args: Any, answer: Any) -> None:
        if answer.loss is not None:
            self.losses.append(answer.loss.item())

    def train(
        self, callback: Any, *, resume: Any = None, collate: Any = None, **settings: Any
    ) -> None:
        arguments = TrainingArguments(
            str(self.folder),
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=3,
            learning_rate=0.05,
            optim="sgd",
            remove_unused_columns=False,
            **{
                "per_device_train_batch_size": 2,
                "num_train_epochs": 4,
                "save_strategy": "no",
                **settings,
            },
        )
        trainer = Trainer(
            self.model,
            arguments,
            train_dataset=self.dataset,
            eval_dataset=self.dataset,
            data_collator=collate,
            callbacks=[callback],
        )
        trainer.train(resume_from_checkpoint=resume)


def assert_losses_and_weights(ours: Any, plain: Any, rounding: float = 1e-9) -> None:
    assert ours.losses == pytest.approx(plain.losses, rel=rounding, abs=rounding)
    expected = plain.model.state_dict()
    for name, tensor in ours.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=rounding, atol=rounding)


@pytest.fixture(autouse=True)
def rows_are_used(caplog: pytest.LogCaptureFixture) -> Any:
    """Let no forward run from its start where it should not."""
    yield
    assert "given other inputs" not in caplog.text


def compare(
    folder: Path,
    make: Callable[[Path], Training],
    settings: Mapping[str, Any],
    *,
    freeze: Any = by_step,
    rounding: float = 1e-9,
) -> None:
    """Train with rows and without, and compare all losses and weights."""
    every = 1 if callable(freeze) else None
    plain, ours = make(folder / "plain"), make(folder / "ours")
    plain.train(FreezeCallback(freeze, every_steps=every, cache=False), **settings)
    callback = FreezeCallback(freeze, every_steps=every, cache_folder=folder)
    ours.train(callback, **settings)
    assert_losses_and_weights(ours, plain, rounding)
    assert callback.stats.hits + callback.stats.upgrades > 0
    blocks = ours.model.get_submodule(ours.blocks)
    assert not any("forward" in vars(module) for module in blocks.modules())


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulates": {"gradient_accumulation_steps": 2},
    "drops_last": {"per_device_train_batch_size": 3, "dataloader_drop_last": True},
    "evaluates": {"eval_strategy": "steps", "eval_steps": 2},
    "checkpoints_layers": {"gradient_checkpointing": True},
    "workers": {"dataloader_num_workers": 2, "num_train_epochs": 3},
}


FAST = {("texts", "workers"), ("images", "accumulates")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind,
            name,
            id=f"{kind_name}-{name}",
            marks=() if (kind_name, name) in FAST else pytest.mark.slow,
        )
        for kind_name, kind in (("texts", TEXTS), ("images", IMAGES))
        for name in SETTINGS
    ],
)
def test_rows_change_nothing_that_a_trainer_computes(
    name: str, kind: Kind, tmp_path: Path
) -> None:
    compare(tmp_path, lambda folder: Training(folder, kind), SETTINGS[name])


@pytest.mark.parametrize(
    "freeze",
    [
        "linear:0,0.5",
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(BY_EPOCH, marks=pytest.mark.slow),
        pytest.param("schedule:0,2,1,2", marks=pytest.mark.slow),
    ],
)
def test_what_freezes_is_said_as_in_a_loop(freeze: Any, tmp_path: Path) -> None:
    compare(tmp_path, Training, {}, freeze=freeze)


def lora(model: nn.Module) -> nn.Module:
    """Put random adapters into all blocks."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, init_lora_weights=False, target_modules=["c_attn"], fan_in_fan_out=True
    )
    return peft.get_peft_model(model, config).double()  # type: ignore[arg-type]


@pytest.mark.slow
def test_adapters_of_peft_freeze_with_their_blocks(tmp_path: Path) -> None:
    compare(tmp_path, lambda folder: Training(folder, change=lora), {})


def test_rows_of_autocast_are_computed_in_it(tmp_path: Path) -> None:
    def make(folder: Path) -> Training:
        return Training(folder, change=lambda model: model.float())

    # Bits in float32 and bfloat16 depend on the machine's kernels.
    compare(tmp_path, make, {"bf16": True}, rounding=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_served(backend: str, tmp_path: Path) -> None:
    settings = {"torch_compile": True, "torch_compile_backend": backend, "num_train_epochs": 2}
    compare(tmp_path, Training, settings, freeze=(1, 2))


@pytest.mark.parametrize(
    ("num_batches", "kind"), [slow(1, TEXTS), slow(1, IMAGES), slow(2, TEXTS), (2, IMAGES)]
)
def test_a_training_resumes_within_an_epoch(num_batches: int, kind: Kind, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": num_batches, "save_steps": 3}
    plain, ours = Training(tmp_path, kind), Training(tmp_path / "ours", kind)
    callback = FreezeCallback(by_step, every_steps=1, cache=False)
    plain.train(callback, save_strategy="steps", **settings)
    done = len(plain.losses)
    saved = tmp_path / "checkpoint-3"
    # transformers' Trainer does not find all of a Beit's weights in its own checkpoint.
    model: Any = ours.model
    model.load_state_dict(type(model).from_pretrained(saved, dtype=torch.float64).state_dict())
    # Blocks were frozen before step 3, and thaw behind it.
    resumed = FreezeCallback(by_step, every_steps=1, cache_folder=tmp_path)
    ours.train(resumed, resume=str(saved), **settings)
    plain.losses = plain.losses[done - len(ours.losses) :]
    assert_losses_and_weights(ours, plain)
    assert done > len(ours.losses) > 0 and resumed.stats.hits > 0


class _Broken(RuntimeError):
    """Be what a training fails with."""


def test_a_callback_serves_the_training_after_one_that_failed(tmp_path: Path) -> None:
    failed, ours, plain = (Training(tmp_path / name) for name in ("failed", "ours", "plain"))

    def fail(*_: Any) -> None:
        if len(failed.losses) > 7:
            raise _Broken("at the end")

    failed.model.register_forward_hook(fail)
    callback = FreezeCallback(by_step, every_steps=1, cache_folder=tmp_path)
    with pytest.raises(_Broken, match="at the end"):
        failed.train(callback)
    ours.train(callback)
    plain.train(FreezeCallback(by_step, every_steps=1, cache=False))
    assert_losses_and_weights(ours, plain)
    blocks = failed.model.get_submodule(failed.blocks)
    assert not any("forward" in vars(module) for module in blocks.modules())


def wrapped(model: nn.Module) -> nn.Module:
    """Put something of one's own around a model's forward."""
    own = type(model).forward

    @functools.wraps(own)
    def forward(self: nn.Module, **given: Any) -> Any:
        return own(self, **given)

    vars(model)["forward"] = MethodType(forward, model)
    return model


def test_hits_are_told_after_each_epoch_of_a_training(tmp_path: Path) -> None:
    hits = []

    class Noting(FreezeCallback):
        def on_epoch_end(self, *given: Any, **facts: Any) -> None:
            super().on_epoch_end(*given, **facts)
            hits.append(self.stats.hits)

    callback = Noting([0, 2, 2, 2], cache_folder=tmp_path)
    Training(tmp_path).train(callback)
    assert hits[0] == 0 < hits[2] < hits[3] == callback.stats.hits


def test_a_model_that_cannot_be_cut_has_rows_of_its_last_frozen_block(tmp_path: Path) -> None:
    plain, ours = (Training(tmp_path / name, change=wrapped) for name in ("plain", "ours"))
    plain.train(FreezeCallback(2, cache=False))
    callback = FreezeCallback(2, cache_folder=tmp_path)
    ours.train(callback)
    assert_losses_and_weights(ours, plain)
    assert callback.stats.hits > 0
    blocks = ours.model.get_submodule(ours.blocks)
    trains = [any(p.requires_grad for p in block.parameters()) for block in blocks.children()]
    assert trains == [False, False, True]


class Headed(nn.Module):
    """A head, and no block."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(x), labels)}


def test_a_model_without_blocks_is_refused_by_name(tmp_path: Path) -> None:
    data = [{"x": torch.randn(4), "labels": torch.tensor(i % 2)} for i in range(8)]
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    for asked, why in ((None, "Headed has no list"), (True, "Headed has no row of blocks")):
        callback = FreezeCallback(1, cache=asked)
        trainer = Trainer(Headed(), arguments, train_dataset=data, callbacks=[callback])
        with pytest.raises(ValueError, match=why):
            trainer.train()


def test_a_tied_embedding_that_trains_is_said_to_be_why_nothing_is_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = KINDS["gpt2"]
    plain, ours = Training(tmp_path / "plain", kind), Training(tmp_path / "ours", kind)
    plain.train(FreezeCallback(BY_EPOCH, cache=False))
    callback = FreezeCallback(BY_EPOCH, cache_folder=tmp_path)
    ours.train(callback)
    assert_losses_and_weights(ours, plain)
    assert "no cache: the embedding is tied to the head and goes on training" in caplog.text
    assert callback.stats.hits == callback.stats.misses == 0
    frozen = FreezeCallback(BY_EPOCH, cache_folder=tmp_path, tied_weights="freeze")
    Training(tmp_path / "frozen", kind).train(frozen)
    assert frozen.stats.upgrades > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 3}, r"unknown setting\(s\) epochs; known: cache_folder"),
        ({"cache": False, "seed": 1}, "cache=False keeps no rows, so that seed would have no"),
        ({"freeze": "all"}, "freeze is 'all'; give a number of blocks"),
        ({"freeze": [0, -1]}, "freeze is .0, -1.; give a number of blocks"),
        ({"freeze": 7}, "the freeze schedule freezes up to 7 layers, but 3"),
        ({"layers": [nn.Identity()]}, "layers has 1 blocks, but the model runs 3 others"),
    ],
)
def test_what_cannot_freeze_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        Training(tmp_path).train(FreezeCallback(**{"freeze": 2, **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 2, "ddp_find_unused_parameters": False}, "set ddp_find_unused_param"),
        ({"world_size": 2, "gradient_checkpointing": True}, "set ddp_find_unused_parameters=True"),
        ({"world_size": 2, "ddp_static_graph": True}, "and no ddp_static_graph"),
        ({"n_gpu": 2}, "DataParallel copies the model to 2 GPUs"),
        ({"fsdp": ["full_shard"]}, "FSDP1 and DeepSpeed hold parts .* use FSDP2"),
        ({"deepspeed": {}, "fsdp": True}, "FSDP1 and DeepSpeed hold parts of each weight"),
    ],
)
def test_a_wrapper_within_which_nothing_can_freeze_is_refused(
    change: dict[str, Any], message: str
) -> None:
    usual: dict[str, Any] = dict.fromkeys(
        ("ddp_find_unused_parameters", "gradient_checkpointing", "ddp_static_graph", "fsdp",
         "deepspeed")
    )  # fmt: skip
    arguments = SimpleNamespace(**{**usual, "world_size": 1, "n_gpu": 1, **change})
    with pytest.raises(ValueError, match=message):
        FreezeCallback(2).on_train_begin(
            arguments, None, None, model=torch.nn.Linear(1, 1), train_dataloader=None
        )


def replicated(folder: Path, caches: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Train by transformers' Trainer on every rank."""
    training = Training(folder / "plain")
    kept: dict[str, Any] = {"cache_folder": folder} if caches else {"cache": False}
    callback = FreezeCallback(by_step, every_steps=1, **kept)
    training.train(
        callback,
        ddp_find_unused_parameters=True,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=1,
    )
    weights = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    return training.losses, weights, callback.stats.hits


def test_replicas_share_their_rows_and_end_as_without(two_ranks: Pool, tmp_path: Path) -> None:
    ours = two_ranks.run(replicated, tmp_path, True)
    plain = two_ranks.run(replicated, tmp_path, False)
    for (losses, weights, hits), (expected, others, _) in zip(ours, plain, strict=True):
        assert len(losses) == 20 and hits > 0
        assert losses == pytest.approx(expected, rel=1e-9, abs=0)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, others[name], rtol=1e-9, atol=1e-12)

"""Policies see the same of a training in the real trainers, and go on in a resumed one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from freeze import FreezeContext, FreezePolicy, Guarded, apply
from pipetransformer import FreezeCallback
from tests.helpers.freezing import Net, same, state


class Sentences(Dataset[dict[str, Tensor]]):
    """Hold a few made-up sentences."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(index)
        ids = torch.randint(5, 40, (6,), generator=chance)
        return {"input_ids": ids, "labels": torch.tensor(index % 2)}


def two_by_step_four(context: FreezeContext) -> int:
    return 2 if context.step >= 4 else 0


def noting(seen: list[FreezeContext]) -> Callable[[FreezeContext], None]:
    """Return a policy that notes what it sees behind each step, and freezes nothing."""
    return lambda context: seen.append(context) if context.step else None


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )


def train(folder: Path, callbacks: list[Any], model: nn.Module, **further: Any) -> Trainer:
    resume, scaler = further.pop("resume", None), further.pop("scaler", None)
    chosen = further.pop("optimizers", (None, None))
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        save_steps=4,
        disable_tqdm=True,
        seed=3,
        **{"num_train_epochs": 1, "save_strategy": "no", **further},
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=callbacks,
        optimizers=chosen,
    )
    trainer.accelerator.scaler = scaler
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def frozen_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """Train with two layers frozen from step 4 on; return the folder and the model."""
    folder, model = tmp_path_factory.mktemp("run"), bert()
    callback = FreezeCallback(two_by_step_four, every_steps=2, cache=False)
    train(folder, [callback], model, save_strategy="steps")
    return folder, model


def test_a_run_of_transformers_freezes_and_resumes_frozen(
    tmp_path: Path, frozen_run: tuple[Path, nn.Module]
) -> None:
    folder, model = frozen_run
    resumed, middle = bert(), bert()
    checkpoint = shutil.copytree(folder / "checkpoint-4", tmp_path / "checkpoint-4")
    middle.load_state_dict(BertForSequenceClassification.from_pretrained(checkpoint).state_dict())
    again = FreezeCallback(two_by_step_four, every_steps=2, cache=False)
    train(tmp_path, [again], resumed, resume=str(checkpoint))
    assert same(state(resumed), state(model))
    assert same(state(middle.bert.encoder.layer[1]), state(resumed.bert.encoder.layer[1]))
    assert not same(state(middle.bert.encoder.layer[2]), state(resumed.bert.encoder.layer[2]))
    assert again.advice.num_frozen == 2 and again.advice.changes == ((4, 2),)


def test_a_run_of_transformers_resumes_frozen_in_another_folder(
    tmp_path: Path, frozen_run: tuple[Path, nn.Module]
) -> None:
    again, resumed = FreezeCallback(lambda context: None, every_steps=2, cache=False), bert()
    further = {"restore_callback_states_from_checkpoint": True, "max_steps": 6}
    train(tmp_path, [again], resumed, resume=frozen_run[0] / "checkpoint-4", **further)
    assert again.advice.num_frozen == 2 and again.advice.changes == ((4, 2),)
    assert not any(p.requires_grad for p in resumed.bert.encoder.layer[:2].parameters())


def test_a_resume_without_a_state_says_that_the_policy_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, [], bert(), max_steps=4, save_strategy="steps")
    again = FreezeCallback(two_by_step_four, every_steps=2, cache=False)
    train(tmp_path, [again], bert(), resume=tmp_path / "checkpoint-4", max_steps=8)
    assert "trainer_state.json has no 'freeze_advisor'" in caplog.text
    assert again.advice.changes == ((4, 2),)


@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_layers_that_are_checkpointed_pass_no_gradient_on(
    tmp_path: Path, frozen_run: tuple[Path, nn.Module], reentrant: bool
) -> None:
    model, passed = bert(), list[bool]()
    highest = model.bert.encoder.layer[1]
    highest.register_forward_hook(lambda *found: passed.append(found[2].requires_grad))
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    checkpointed = {"gradient_checkpointing": True, **options}
    callback = FreezeCallback(two_by_step_four, every_steps=2, cache=False)
    train(tmp_path, [callback], model, **checkpointed)
    assert passed[-1] is reentrant  # Which layers above need to learn.
    assert same(state(model), state(frozen_run[1]))


def test_a_callback_that_was_used_begins_anew_in_another_run(tmp_path: Path) -> None:
    callback, again = FreezeCallback(two_by_step_four, every_steps=2, cache=False), bert()
    train(tmp_path, [callback], bert())
    for model in (again, again):
        apply(model, 0)  # The last run has frozen it, so that an optimizer would lack its weights.
        train(tmp_path, [callback], model)
        assert [(one.step, one.num_frozen) for one in callback.advice.looks] == [
            (0, 0),
            (2, 0),
            (4, 2),
            (6, 2),
            (8, 2),
        ]
        assert all(one is not None for one in callback.advice.looks[2].updates)


@pytest.mark.parametrize(
    ("further", "expected"),
    [
        ({"max_steps": 10}, [0] * 7 + [1] * 3),
        ({"num_train_epochs": 2, "gradient_accumulation_steps": 3}, [0, 0, 1, 1, 1, 2]),
    ],
)
def test_epochs_in_transformers_are_as_long_as_its_data(
    tmp_path: Path, further: dict[str, Any], expected: list[int]
) -> None:
    seen: list[FreezeContext] = []
    train(tmp_path, [FreezeCallback(noting(seen), every_steps=1, dry_run=True)], bert(), **further)
    assert [one.epoch for one in seen] == expected


def test_a_resumed_run_of_transformers_knows_its_last_evaluation(tmp_path: Path) -> None:
    seen: list[FreezeContext] = []
    evaluated = {"eval_strategy": "steps", "eval_steps": 4}
    saved = {"save_strategy": "steps", **evaluated}
    train(tmp_path, [FreezeCallback(noting(seen), every_steps=2, dry_run=True)], bert(), **saved)
    assert [one.evaluated_at for one in seen] == [None, None, 4, 4]
    again = FreezeCallback(noting(seen), every_steps=2, dry_run=True)
    train(tmp_path, [again], bert(), resume=tmp_path / "checkpoint-4", **evaluated)
    assert seen[4].metrics == seen[2].metrics and "eval_loss" in seen[4].metrics
    assert [one.evaluated_at for one in seen[4:]] == [4, 4]


@pytest.mark.parametrize("one_cycle", [False, True])
def test_policies_in_transformers_see_the_optimizer_s_own_peak(
    tmp_path: Path, one_cycle: bool
) -> None:
    seen: list[FreezeContext] = []
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    make = torch.optim.lr_scheduler
    scheduler = (
        make.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8)
        if one_cycle
        else make.LinearLR(optimizer, 1.0, 0.01, 8)
    )
    chosen = {"optimizers": (optimizer, scheduler), "max_steps": 2}
    train(tmp_path, [FreezeCallback(noting(seen), every_steps=1, dry_run=True)], model, **chosen)
    assert [one.peak_learning_rate for one in seen] == [1e-2 if one_cycle else 1e-3] * 2


def test_what_is_skipped_in_transformers_is_no_update(tmp_path: Path) -> None:
    model = bert()
    callback = FreezeCallback(two_by_step_four, every_steps=1, dry_run=True)
    spoil_second(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    further = {"scaler": scaler, "max_steps": 3, "max_grad_norm": 0.0}
    train(tmp_path, [callback], model, **further)
    assert [one.updates[0] is None for one in callback.advice.looks[1:]] == [False, True, False]


def spoil_second(model: nn.Module) -> None:
    """Make the gradients of the second micro-batch infinite."""
    calls: list[None] = []

    def spoil(gradient: Tensor) -> Tensor:
        calls.append(None)
        return gradient * torch.inf if len(calls) == 2 else gradient

    next(p for p in reversed(list(model.parameters()))).register_hook(spoil)


class Fit:
    """Fit the net as Lightning wants it, with what a test makes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lightning = folder, pytest.importorskip("lightning")

    def module(self, *, one_cycle: bool = False) -> Any:
        """Return a module of the net."""

        class Module(self.lightning.LightningModule):  # type: ignore[misc, name-defined]
            """Train the net."""

            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.net = Net()

            def training_step(self, batch: Any, index: int) -> Tensor:
                loss: Tensor = self.net(batch[0]).square().mean()
                self.log("loss", loss)
                return loss

            def validation_step(self, batch: Any, index: int) -> None:
                self.log("val_loss", self.net(batch[0]).square().mean())

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
                if not one_cycle:
                    return optimizer
                cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=8)
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": {"scheduler": cycle, "interval": "step"},
                }

        return Module()

    def __call__(
        self,
        module: Any,
        callback: Any,
        *,
        data: Any = None,
        resume: Any = None,
        validates: bool = False,
        **further: Any,
    ) -> None:
        every = self.lightning.pytorch.callbacks.ModelCheckpoint(
            self.folder / "saved", every_n_train_steps=4, save_top_k=-1, filename="{step}"
        )
        trainer = self.lightning.Trainer(
            **{"max_epochs": 1, **further},
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback, every],
            default_root_dir=self.folder,
        )
        data = TensorDataset(torch.ones(32, 3)) if data is None else data
        loader = DataLoader(data, batch_size=4)
        trainer.fit(module, loader, loader if validates else None, ckpt_path=resume)


class Stream(IterableDataset[tuple[Tensor]]):
    """Yield rows without telling how many."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return iter([(torch.ones(3),)] * 32)


def test_lightning_s_trainer_freezes_and_resumes_frozen(tmp_path: Path) -> None:
    fit = Fit(tmp_path)
    from pipetransformer import LightningFreezeCallback

    callback = LightningFreezeCallback(two_by_step_four, every_steps=2, cache=False)
    fit(fit.module(), callback)
    assert str(callback.advice).startswith("of 4 layers froze: 2 after step 4. That saves")
    (saved,) = (tmp_path / "saved").glob("step=4.ckpt")
    middle = torch.load(saved, weights_only=True)["state_dict"]
    resumed = fit.module()
    again = LightningFreezeCallback(two_by_step_four, every_steps=2, cache=False)
    fit(resumed, again, resume=saved)
    assert again.advice.num_frozen == 2
    assert torch.equal(resumed.net.blocks[1].linear.weight, middle["net.blocks.1.linear.weight"])
    assert not torch.equal(resumed.net.head.weight, middle["net.head.weight"])


def test_lightning_is_looked_at_once_a_step_while_gradients_accumulate(tmp_path: Path) -> None:
    fit = Fit(tmp_path)
    from pipetransformer import LightningFreezeCallback

    seen: list[FreezeContext] = []
    callback = LightningFreezeCallback(noting(seen), every_steps=2, dry_run=True)
    fit(fit.module(), callback, accumulate_grad_batches=2)
    assert [(one.step, one.max_steps, one.steps_per_epoch) for one in seen] == [
        (2, 4, 4),
        (4, 4, 4),
    ]
    (saved,) = (tmp_path / "saved").glob("step=4.ckpt")
    again = LightningFreezeCallback(noting(seen), every_steps=2, dry_run=True)
    fit(fit.module(), again, resume=saved, accumulate_grad_batches=2, max_epochs=2)
    assert [one.step for one in seen] == [2, 4, 6, 8]


def test_policies_in_lightning_see_the_last_validation(tmp_path: Path) -> None:
    fit = Fit(tmp_path)
    from pipetransformer import LightningFreezeCallback

    seen: list[FreezeContext] = []
    policy = Guarded(Listening(seen), thaw_on="val_loss")
    callback = LightningFreezeCallback(policy, every_steps=2, dry_run=True)
    for begin in (0, 4):  # The callback begins anew.
        fit(fit.module(), callback, validates=True, val_check_interval=2)
        assert [one.evaluated_at for one in seen[begin:]] == [None, 2, 4, 6]
        assert not seen[begin].metrics and "val_loss" in seen[begin + 1].metrics
    (saved,) = (tmp_path / "saved").glob("step=4.ckpt")
    fit(fit.module(), callback, resume=saved, validates=True, val_check_interval=8)
    assert [one.evaluated_at for one in seen[8:]] == [2, 2]  # Saved before that of step 4.


class Listening(FreezePolicy):
    """Note what it sees, and freeze nothing."""

    def __init__(self, seen: list[FreezeContext]) -> None:
        self._seen = seen

    def decide(self, context: FreezeContext) -> None:
        if context.step:
            self._seen.append(context)


def test_policies_in_lightning_see_the_peak_of_one_cycle(tmp_path: Path) -> None:
    fit = Fit(tmp_path)
    from pipetransformer import LightningFreezeCallback

    seen: list[FreezeContext] = []
    fit(
        fit.module(one_cycle=True),
        LightningFreezeCallback(noting(seen), every_steps=2, dry_run=True),
    )
    assert [one.peak_learning_rate for one in seen] == [1.0] * 4
    assert max(one.learning_rate for one in seen) > 0.5


@pytest.mark.parametrize(
    ("data", "further"), [(Stream(), {"max_epochs": 2}), (None, {"max_epochs": -1})]
)
def test_lightning_must_say_how_long_it_trains(
    tmp_path: Path, data: Any, further: dict[str, Any]
) -> None:
    fit = Fit(tmp_path)
    from pipetransformer import LightningFreezeCallback

    module = fit.module()
    before = state(module)
    with pytest.raises(ValueError, match="do not say; give max_steps, or max_epochs with a data"):
        fit(module, LightningFreezeCallback(two_by_step_four), data=data, **further)
    assert same(before, state(module))


def test_what_is_skipped_in_lightning_is_no_update(tmp_path: Path) -> None:
    fit = Fit(tmp_path)
    from pipetransformer import LightningFreezeCallback

    seen: list[FreezeContext] = []
    module = fit.module()
    spoil_second(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    precision = fit.lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    callback = LightningFreezeCallback(noting(seen), every_steps=1, dry_run=True)
    data = TensorDataset(torch.rand(32, 3, generator=torch.Generator().manual_seed(0)))
    fit(module, callback, data=data, plugins=[precision], max_steps=3)
    assert [one.layers[0].relative_update is None for one in seen] == [False, True, False]


def test_data_without_a_length_is_one_epoch_of_all_steps(tmp_path: Path) -> None:
    fit = Fit(tmp_path)
    from pipetransformer import LightningFreezeCallback

    seen: list[FreezeContext] = []
    callback = LightningFreezeCallback(noting(seen), every_steps=2, dry_run=True)
    fit(fit.module(), callback, data=Stream(), max_epochs=-1, max_steps=4)
    assert [(one.max_steps, one.steps_per_epoch) for one in seen] == [(4, 4)] * 2

"""Evaluations within others' trainers have rows: metrics and the training are as without."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from pipetransformer import FreezeCallback
from tests.helpers.any_models import KINDS as KINDS_OF_MODELS
from tests.helpers.any_models import WORDS, build
from tests.helpers.hf_runs import numbers
from tests.helpers.marks import slow
from tests.helpers.part_models import CASES, padded
from tests.helpers.pool import Pool

# In fours: the last bits of sums may depend on the number of samples beside.
NUM, NUM_HELD_OUT = 12, 8
RUNS = Counter[int]()
"""Forwards by block."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        RUNS[id(self)] += 1  # No attribute: that would keep rows away.
        answer: Tensor = hidden + self.drop(torch.tanh(self.linear(hidden)))
        return answer


class _Model(nn.Module):
    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
        return loss | {"logits": logits}


def _samples(num: int, seed: int, *, labelled: bool = True) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 8, generator=draws)
    known = [{"x": one, "name": f"sample {place}"} for place, one in enumerate(x)]
    return [{**one, "labels": place % 3} if labelled else one for place, one in enumerate(known)]


def _table(samples: list[dict[str, Any]]) -> Any:
    columns = {name: [one[name] for one in samples] for name in samples[0]}
    return datasets.Dataset.from_dict({**columns, "x": [x.tolist() for x in columns["x"]]})


KINDS = pytest.mark.parametrize("kind", ["blocks", "parts"])
PARTS = ("blocks.0", "blocks.1")


def _callback(kind: str, model: nn.Module, *, has_rows: bool, **settings: Any) -> Any:
    if kind == "blocks":
        return FreezeCallback([1, 2, 2], **(settings if has_rows else {"cache": False}))
    if has_rows:
        return FreezeCallback(parts=PARTS, cache=True, **settings)
    for part in map(model.get_submodule, PARTS):
        part.requires_grad_(False)
        part.register_forward_pre_hook(lambda module, _: [module.eval(), None][1])
    return TrainerCallback()


def _metrics(prediction: EvalPrediction) -> dict[str, float]:
    found = {"sum": float(prediction.predictions.astype("float64").sum())}
    inputs: Any = prediction.inputs
    return found if inputs is None else found | {"inputs": float(inputs.astype("float64").sum())}


class _Asks(TrainerCallback):  # type: ignore[misc]
    """Evaluate and predict at each epoch's end, and note what runs then."""

    def __init__(self) -> None:
        self.found, self.runs = list[Any](), list[list[int]]()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        blocks = facts["model"].blocks
        before = [RUNS[id(block)] for block in blocks]
        self.found.append(numbers(self.trainer.evaluate()))
        self.found.append(self.trainer.predict(self.unseen).predictions.tolist())
        self.runs.append([RUNS[id(b)] - num for b, num in zip(blocks, before, strict=True)])

    trainer: Any
    unseen: Any


def _train(
    folder: Path, kind: str, make: Callable[[Any], Any], *, has_rows: bool, **settings: Any
) -> tuple[_Asks, Any]:
    model, asks = _Model(), _Asks()
    given = {
        "num_train_epochs": 3, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "logging_steps": 1,
        "learning_rate": 0.05, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "include_for_metrics": ["inputs"],
    }  # fmt: skip
    held_out = {name: make(_samples(NUM_HELD_OUT, seed)) for name, seed in (("a", 2), ("b", 3))}
    trainer = Trainer(
        model,
        TrainingArguments(str(folder), **given | settings),
        train_dataset=make(_samples(NUM, 1)),
        eval_dataset=held_out,
        compute_metrics=_metrics,
        callbacks=[_callback(kind, model, has_rows=has_rows, prefix_chunk=4), asks],
    )
    asks.trainer, asks.unseen = trainer, make(_samples(NUM_HELD_OUT, 4, labelled=False))
    trainer.train()
    return asks, trainer


def _assert_same(ours: Any, plain: Any) -> None:
    logs, expected = (list(map(numbers, one.state.log_history)) for one in (ours, plain))
    assert logs[:-1] == expected[:-1]  # The last one has counts of operations.
    assert sum("eval_a_loss" in one for one in logs) > 6
    for one, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@KINDS
@pytest.mark.parametrize(
    "make", [pytest.param(list, marks=pytest.mark.slow), _table], ids=["list", "table"]
)
def test_evaluations_and_predictions_have_rows_and_change_nothing(
    kind: str, make: Callable[[Any], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, plain = _train(tmp_path, kind, make, has_rows=False)
    asks, ours = _train(tmp_path, kind, make, has_rows=True)
    assert asks.found == expected.found and len(asks.found) == 6
    _assert_same(ours, plain)
    # Three sets have two batches each.
    assert expected.runs[-1] == [6, 6, 6]
    assert asks.runs[-1] == [0, 0, 6]
    assert "evaluation_loop" not in vars(ours)
    assert numbers(ours.evaluate()) == numbers(plain.evaluate())
    assert not [one for one in caplog.records if one.name.startswith("pipetransformer")]


def _texts(num: int) -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(num)
    texts = [torch.randint(3, WORDS, (6 + 3 * n % 5,), generator=draws) for n in range(num)]
    return [{"input_ids": t, "attention_mask": torch.ones_like(t), "labels": t} for t in texts]


def _evaluate_texts(
    folder: Path, kind: type[Trainer], *, has_rows: bool, **given: Any
) -> tuple[Any, list[dict[str, float]]]:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=4, eval_strategy="epoch",
        per_device_eval_batch_size=4, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    caches = {"prefix_chunk": 4} if has_rows else {"cache": False}
    trainer = kind(
        build(KINDS_OF_MODELS["llama"]).float(), arguments, data_collator=padded,
        train_dataset=_texts(NUM), eval_dataset=_texts(NUM_HELD_OUT),
        callbacks=[FreezeCallback(2, **caches)], **given,
    )  # fmt: skip
    trainer.train()
    return trainer, [numbers(one) for one in trainer.state.log_history[:-1]]


def test_metrics_may_read_what_is_returned_of_padding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows once took its place, as labels were given, and the loss reads no padding."""
    given = {"compute_metrics": _metrics}
    _, expected = _evaluate_texts(tmp_path, Trainer, has_rows=False, **given)
    with caplog.at_level(logging.WARNING):
        _, found = _evaluate_texts(tmp_path, Trainer, has_rows=True, **given)
    assert found == expected and sum("eval_sum" in one for one in found) == 2
    assert "no cache: samples have unequal shapes" in caplog.text


class _ReadsStates(Trainer):  # type: ignore[misc]
    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        with torch.no_grad():
            answer = model(**inputs, output_hidden_states=True)
        self.found = [*getattr(self, "found", []), *map(Tensor.tolist, answer.hidden_states)]
        return answer.loss, None, None


def test_an_evaluation_may_call_the_model_in_another_way(tmp_path: Path) -> None:
    """Samples for a look at that call were read by our own collate_fn, and so on, without end."""
    plain, expected = _evaluate_texts(tmp_path, _ReadsStates, has_rows=False)
    ours, found = _evaluate_texts(tmp_path, _ReadsStates, has_rows=True)
    assert found == expected and ours.found == plain.found


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(_samples(NUM_HELD_OUT, 2))


def test_an_evaluation_that_cannot_have_rows_runs_what_is_frozen_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(samples: list[Any]) -> Any:
        return samples if len(samples) == NUM else _Stream()

    expected, plain = _train(tmp_path, "parts", make, has_rows=False, max_steps=9)
    with caplog.at_level(logging.WARNING):
        asks, ours = _train(tmp_path, "parts", make, has_rows=True, max_steps=9)
    assert asks.found == expected.found
    _assert_same(ours, plain)
    assert asks.runs[-1] == expected.runs[-1]
    (told,) = [one for one in caplog.messages if "evaluations run" in one]
    assert "evaluations run what is frozen" in told


@pytest.mark.parametrize("name", [slow("t5, padded texts"), slow("whisper")])
def test_texts_that_are_generated_in_an_evaluation_are_as_without_rows(
    name: str, tmp_path: Path
) -> None:
    case, found = CASES[name], list[Any]()
    callback = FreezeCallback(parts=case.parts, cache=True, prefix_chunk=4)
    for has_rows in (False, True):
        torch.manual_seed(0)
        model: Any = case.build()
        torch.manual_seed(1)
        data = case.data()
        (encoder,) = map(model.get_submodule, case.parts)
        encoder.requires_grad_(False)
        if not has_rows:
            encoder.register_forward_pre_hook(lambda module, _: [module.eval(), None][1])
        arguments = Seq2SeqTrainingArguments(
            str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, eval_on_start=True,
            per_device_eval_batch_size=4, eval_strategy="epoch", predict_with_generate=True,
            generation_max_length=8, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, logging_steps=1, seed=3,
        )  # fmt: skip
        trainer = Seq2SeqTrainer(
            model, arguments, train_dataset=data, eval_dataset=data, data_collator=case.collate,
            callbacks=[callback] if has_rows else [], compute_metrics=_metrics,
        )  # fmt: skip
        trainer.train()
        found.append([numbers(one) for one in trainer.state.log_history[:-1]])
    # A row of a padded text may be computed at another length, in another order of sums.
    for one, other in zip(*found, strict=True):
        assert other == pytest.approx(one, rel=1e-6)
    assert callback.stats.hits == len(data)


lightning = pytest.importorskip("lightning")


class _Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.model, self.found, self.runs = _Model(), list[Any](), list[list[int]]()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.model(batch["x"], batch["labels"])["loss"]
        self.found.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        answer = self.model(batch["x"], batch["labels"])
        self.found.append((dataloader_idx, answer["loss"].item(), answer["logits"].tolist()))
        self.log("loss", answer["loss"])

    def on_validation_start(self) -> None:
        self.before = [RUNS[id(block)] for block in self.model.blocks]

    def on_validation_end(self) -> None:
        pairs = zip(self.model.blocks, self.before, strict=True)
        self.runs.append([RUNS[id(block)] - num for block, num in pairs])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


def _fit(
    folder: Path, kind: str, *, has_rows: bool, num_sets: int, **settings: Any
) -> tuple[_Module, Any]:
    from pipetransformer import LightningFreezeCallback

    module = _Module()
    callback: Any = lightning.pytorch.Callback()
    if has_rows or kind == "blocks":
        kinds = {"blocks": {"freeze": [1, 2, 2]}, "parts": {"parts": PARTS}}
        caches = {"cache": True, "prefix_chunk": 4} if has_rows else {"cache": False}
        callback = LightningFreezeCallback(**kinds[kind], **caches)
    else:
        _callback(kind, module.model, has_rows=False)
    trainer = lightning.Trainer(
        **{"max_epochs": 3, "val_check_interval": 2, **settings},
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, callbacks=[callback], default_root_dir=folder,
    )  # fmt: skip
    sets: list[Any] = [
        DataLoader(_samples(NUM_HELD_OUT, seed), batch_size=4)  # type: ignore[arg-type]
        for seed in range(2, 2 + num_sets)
    ]
    torch.manual_seed(3)
    train_set: Any = _samples(NUM, 1)
    loader = DataLoader[Any](train_set, batch_size=4, shuffle=True)
    trainer.fit(module, loader, sets if num_sets > 1 else sets[0])
    module.found.append(float(torch.rand(())))  # Random numbers go on alike, too.
    return module, trainer


def _in_replicas(folder: Path, has_rows: bool) -> tuple[list[Any], list[Tensor], list[int]]:
    settings: dict[str, Any] = {"ddp_find_unused_parameters": True, "logging_steps": 2}
    asks, trainer = _train(folder, "parts", list, has_rows=has_rows, **settings)
    logs = [numbers(one) for one in trainer.state.log_history[:-1]]
    return [*asks.found, *logs], [*map(Tensor.detach, trainer.model.parameters())], asks.runs[-1]


@pytest.mark.slow
def test_replicas_evaluate_from_rows_that_they_share(two_ranks: Pool, tmp_path: Path) -> None:
    ours = two_ranks.run(_in_replicas, tmp_path, True)
    plain = two_ranks.run(_in_replicas, tmp_path, False)
    for (found, weights, runs), (expected, others, _) in zip(ours, plain, strict=True):
        assert runs == [0, 0, 3] and len(found) == len(expected)
        # Ranks compute a share of rows each, with fewer samples beside.
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(weights, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@KINDS
@pytest.mark.parametrize("num_sets", [slow(1), 2])
def test_validations_of_lightning_have_rows_and_change_nothing(
    kind: str, num_sets: int, tmp_path: Path
) -> None:
    plain, _ = _fit(tmp_path, kind, has_rows=False, num_sets=num_sets)
    ours, trainer = _fit(tmp_path, kind, has_rows=True, num_sets=num_sets)
    assert ours.found == plain.found
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    num = 2 * num_sets
    assert plain.runs[-1] == [num, num, num] and len(plain.runs) > 3
    assert ours.runs[-1] == [0, 0, num]
    assert "run" not in vars(trainer.fit_loop.epoch_loop.val_loop)

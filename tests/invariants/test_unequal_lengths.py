"""Prove that samples padded batch by batch, by workers or not, train as in a plain loop."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from autodp.sampler import EpochSampler, shuffled, shuffled_by_length
from pipetransformer import FreezeSchedule, LayeredModel, Loss, Sublayer, Trainer
from pipetransformer.model import NamedParameters
from tests.helpers.inspection import coming_of, elastic_of
from tests.helpers.marks import slow
from tests.helpers.measured import freely, measuring
from tests.helpers.pool import Pool
from tests.helpers.texts import pad_to_longest, plain_losses, sentences, tiny_bert

FROZEN = (0, 1, 2, 2)
BATCH = 6


def sgd(named: NamedParameters) -> Optimizer:
    return SGD([parameter for _, parameter in named], lr=0.2)


def reader(rows: Any = None, model: Any = None, **settings: Any) -> Trainer:
    """Build a Trainer of the tiny BERT, or another model, on sentences, or other rows."""
    usual = {"collate_fn": pad_to_longest, "global_batch_size": BATCH, "progress": False}
    return Trainer(
        tiny_bert() if model is None else model,
        sentences() if rows is None else rows,
        optimizer=sgd,
        **{**usual, **settings},
    )


def to_the_end(trainer: Trainer) -> tuple[list[float], int]:
    """Return the loss of every step, and how many samples were read from the cache."""
    with trainer:
        losses = []
        while not trainer.is_over:
            losses.append(trainer.step().loss)
        return losses, trainer.report.cache_hits


def freezing(rows: Any = None, **settings: Any) -> Trainer:
    """Build a Trainer that freezes as `plain_losses` is told to."""
    return reader(rows, freeze=FreezeSchedule(FROZEN), epochs=len(FROZEN), **settings)


def train(settings: dict[str, Any]) -> tuple[list[float], int]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return to_the_end(freezing(eval_dataset=sentences(9), **settings))


@pytest.mark.parametrize("workers", [0, slow(2)])
@pytest.mark.parametrize(
    "settings",
    [
        slow({"cache": False}),
        slow({"pipeline_length": 2, "micro_batches": 2}),
        slow({"pipeline_length": 1}),
        {"pipeline_length": 2, "micro_batches": 3, "cache_limit_bytes": 20_000},
        {"micro_batch_size": 2, "freeze_interval_steps": 3, "num_workers": 2},
    ],
    ids=str,
)
def test_losses_are_those_of_a_plain_loop_that_pads_the_global_batch(
    two_ranks: Pool, settings: dict[str, Any], workers: int
) -> None:
    expected = plain_losses(tiny_bert(), sentences(), frozen=FROZEN, batch_size=BATCH)
    if "freeze_interval_steps" in settings:
        settings = {**settings, "freeze_interval_steps": 4}
    results = two_ranks.run(train, {"num_workers": workers, **settings})
    for losses, _ in results:
        assert losses == pytest.approx(expected, abs=1e-9, rel=1e-7)
    if settings.get("cache", True):
        assert max(hits for _, hits in results) > 0


def test_a_batch_has_samples_of_about_equal_lengths_where_that_is_asked_for() -> None:
    lengths = torch.tensor([len(row["input_ids"]) for row in sentences(200)])
    usual = EpochSampler(200, shuffled(200, seed=0))
    grouped = EpochSampler(200, shuffled_by_length(lengths, seed=0, batch_size=2))
    for epoch in range(2):
        order = grouped.global_batch(epoch, 0, 200)
        assert sorted(order.tolist()) == list(range(200))
        # An epoch has four pools of 25 batches.
        assert set(order[:50].tolist()) == set(usual.global_batch(epoch, 0, 50).tolist())
        for pool in lengths[order].split(50):
            assert torch.equal(pool, pool.sort(descending=True).values)
    with reader(group_by_length=True) as trainer:
        first, _ = coming_of(trainer).next_two(elastic_of(trainer).replicas)
    found = [len(sentences()[index]["input_ids"]) for index in first.ids.tolist()]
    assert found == sorted(found, reverse=True)


def test_a_cache_without_a_mask_for_unequal_lengths_is_not_made_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def without_mask(items: list[dict[str, Any]]) -> dict[str, Any]:
        batch = pad_to_longest(items)
        del batch["attention_mask"]
        return batch

    _, hits = to_the_end(reader(freeze=FreezeSchedule((1,)), epochs=3, collate_fn=without_mask))
    assert hits == 0
    assert "no cache: samples have unequal shapes of ['input_ids']" in caplog.text


def test_a_mask_that_only_batches_with_padding_have_reaches_the_layers_that_train() -> None:
    # Behind frozen layers, cached or not, a batch had the first sample's entries alone (loss off
    # by 0.08).
    def mask_if_needed(items: list[dict[str, Any]]) -> dict[str, Any]:
        batch = pad_to_longest(items)
        if batch["attention_mask"].all():
            del batch["attention_mask"]
        return batch

    (padded, _), (masked, _) = (
        to_the_end(reader(freeze=FreezeSchedule((1,)), collate_fn=collate))
        for collate in (pad_to_longest, mask_if_needed)
    )
    assert padded == pytest.approx(masked, abs=1e-12)


def test_a_mask_that_the_first_sample_lacks_is_not_left_out_of_rows() -> None:
    # All samples have one shape, so that rows without it were taken for theirs.
    def mask_if_needed(items: list[dict[str, Any]]) -> dict[str, Any]:
        batch = {n: torch.tensor([item[n] for item in items]) for n in ("input_ids", "labels")}
        mask = (batch["input_ids"] > 0).long()
        return {**batch, "attention_mask": mask} if not mask.all() else batch

    whole = pad_to_longest([{k: v for k, v in r.items() if k != "sentence"} for r in sentences()])
    rows = [{n: whole[n][i].tolist() for n in ("input_ids", "labels")} for i in range(22)]
    rows[0]["input_ids"] = [7] * len(rows[0]["input_ids"])
    trainer = reader(rows, freeze=FreezeSchedule((1,)), epochs=3, collate_fn=mask_if_needed)
    with measuring(freely), trainer:
        with pytest.raises(ValueError, match=r"come with \['attention_mask'\], which the first"):
            trainer.fit()


class Tokens(nn.Module):
    """Embed tokens, and let each look at those of its sample that are no padding."""

    def __init__(self, num_before: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 8)
        self.num_before = num_before

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(nn.functional.pad(x, (self.num_before, 0), value=1))
        return embedded


class Looks(nn.Module):
    """Add the mean of a sample's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is not None
        mask = nn.functional.pad(mask, (hidden.shape[1] - mask.shape[1], 0), value=1)
        weights = (mask / mask.sum(1, keepdim=True).clamp(min=1)).unsqueeze(-1)
        mixed: Tensor = self.inner((hidden * weights).sum(1, keepdim=True))
        return hidden + torch.tanh(mixed)


def tagger(num_before: int = 0) -> LayeredModel:
    """Build a model that gives a number for each token, and for some that it puts before them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(Tokens(num_before), Looks(), Looks(), nn.Linear(8, 1)).double()
    names = ("embedding", "first", "second", "head")
    sublayers = [
        Sublayer(name, layer, module, ("mask",) if 0 < layer < 3 else ())
        for layer, (name, module) in enumerate(zip(names, model, strict=True))
    ]
    return LayeredModel(model, sublayers, inputs=("x",), targets=("y",), padding_mask="mask")


def tagged(num: int = 16, *, in_front: bool = False, target_padding: float = -1.0) -> Any:
    """Return samples, and a function that pads them, in front or with any target."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 9, (num,), generator=generator).tolist()
    rows = [
        {"x": torch.randint(1, 60, (n,), generator=generator), "y": torch.rand(n), "length": 7}
        for n in lengths
    ]

    def padded(values: Tensor, most: int, value: float) -> Tensor:
        gap = most - len(values)
        return torch.nn.functional.pad(values, (gap, 0) if in_front else (0, gap), value=value)

    def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        most = max(len(item["x"]) for item in items)
        return {
            "x": torch.stack([padded(item["x"], most, 0) for item in items]),
            "mask": torch.stack([padded(torch.ones_like(i["x"]), most, 0) for i in items]),
            "y": torch.stack([padded(i["y"].double(), most, target_padding) for i in items]),
        }

    return rows, collate


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared errors of the targets that are none of the padding."""
    counts, output = target >= 0, output.squeeze(-1)[:, -target.shape[1] :]
    return ((output - target).square() * counts).sum(), counts.sum()


def cached_and_not(
    rows: Any, collate: Any, *, num_before: int = 0
) -> tuple[list[float], int, list[float]]:
    """Train a tagger with a cache and without; return the losses with its hits, and without."""
    usual = {"loss_fn": Loss(squares, is_exact=True), "epochs": 6, "collate_fn": collate}
    (cached, hits), (uncached, _) = (
        to_the_end(
            reader(
                rows,
                tagger(num_before),
                freeze=FreezeSchedule((0, 1, 2, 1, 2, 2)),
                cache=cache,
                **usual,
            )
        )
        for cache in (True, False)
    )
    return cached, hits, uncached


@pytest.mark.parametrize("target_padding", [-1.0, slow(-100.0)])
def test_cached_targets_have_the_padding_that_collate_fn_gave_them(target_padding: float) -> None:
    # They were padded with -100, whatever the loss took for none.
    rows, collate = tagged(target_padding=target_padding)
    cached, hits, uncached = cached_and_not(rows, collate)
    assert cached == pytest.approx(uncached, abs=1e-12) and hits > 0


@pytest.mark.parametrize("are_equal", [True, False])
def test_tokens_that_a_layer_puts_before_a_sample_s_own_cut_none_off(are_equal: bool) -> None:
    # As many as these came back as zeros at a sample's end (loss off by 0.02). Where samples
    # had unequal lengths a step without hits lost them, too, or the run ended.
    rows, collate = tagged()
    if are_equal:
        whole, collate = collate(rows), None
        rows = [{name: entry[i] for name, entry in whole.items()} for i in range(len(rows))]
    cached, hits, uncached = cached_and_not(rows, collate, num_before=2)
    assert cached == pytest.approx(uncached, abs=1e-12) and (hits > 0) == are_equal


def test_samples_that_are_padded_in_front_are_not_cached_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Their positions moved with the longest of each batch.
    rows, collate = tagged(in_front=True)
    cached, hits, uncached = cached_and_not(rows, collate)
    assert cached == uncached and hits == 0
    assert "collate_fn does not pad" in caplog.text


def test_rows_that_a_batch_trims_are_not_cached_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The first batch that was narrower ended the run.
    rows, _ = tagged()
    wide = [{"x": torch.nn.functional.pad(r["x"], (0, 9 - len(r["x"]))), "y": 0} for r in rows]

    def trim(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        x = torch.stack([item["x"] for item in items])
        x = x[:, : int((x > 0).sum(1).max())]
        return {"x": x, "mask": (x > 0).long(), "y": torch.where(x > 0, 0.5, -1.0).double()}

    cached, hits, uncached = cached_and_not(wide, trim)
    assert cached == pytest.approx(uncached, abs=1e-12)
    assert hits > 0 or "not kept in the cache" in caplog.text


def test_a_sample_of_nothing_but_padding_is_cached_whole() -> None:
    # Its first position, which the pooler reads, came back as zeros.
    rows = sentences()
    most = max(len(row["input_ids"]) for row in rows)
    rows[3] = {**rows[3], "input_ids": [7] * most, "attention_mask": [0] * most}
    cached, hits = to_the_end(freezing(rows))
    uncached, no_hits = to_the_end(freezing(rows, cache=False))
    assert cached == pytest.approx(uncached, abs=1e-9) and hits > 0 == no_hits


def other_orders(_: None) -> str:
    rank = int(os.environ["RANK"])

    def order(epoch: int) -> Tensor:
        return torch.randperm(22, generator=torch.Generator().manual_seed(rank))

    with reader(sample_order=order) as trainer:
        with pytest.raises(ValueError, match="sample_order gives ranks other orders"):
            trainer.step()
    return "refused"


def test_orders_that_differ_between_ranks_are_refused(two_ranks: Pool) -> None:
    # Some samples were trained twice, and others never.
    assert two_ranks.run(other_orders, None) == ["refused"] * 2


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda epoch: [0] * 22, "the order of epoch 0 is of 22 indices, not of each of 0..21"),
        (lambda epoch: torch.arange(21), "the order of epoch 0 is of 21 indices"),
    ],
    ids=["repeats", "too few"],
)
def test_an_order_that_leaves_samples_out_is_refused(order: Any, message: str) -> None:
    with reader(sample_order=order) as trainer:
        with pytest.raises(ValueError, match=message):
            trainer.step()

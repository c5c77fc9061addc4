"""Cached equals uncached whatever rows hold: short sentences, views, rounded activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from freeze import FreezeSchedule
from pipetransformer import Trainer
from tests.adapted import LENGTH, classifier
from tests.measured import freely, measuring
from tests.models import tiny_data, tiny_model

NUM_SENTENCES = 24


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentences of 1 to LENGTH tokens, padded at their ends."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, 20, (NUM_SENTENCES, LENGTH), generator=generator)
        lengths = torch.arange(NUM_SENTENCES) % LENGTH + 1
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        self.reads = 0

    def __len__(self) -> int:
        return NUM_SENTENCES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        label = self.ids[index].sum() % 3
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index], "labels": label}


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """The tiny data with noise, another one at each read."""

    def __len__(self) -> int:
        return len(tiny_data())

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = tiny_data()[index]
        return x + torch.randn_like(x), y


def train(model: nn.Module, data: Any, **settings: Any) -> tuple[Trainer, dict[str, Tensor]]:
    """Train with one layer frozen from the start and two later; return the weights."""
    with (
        measuring(freely),
        Trainer(
            model,
            data,
            **{
                "freeze": FreezeSchedule([1, 1, 1, 2]),
                "epochs": 6,
                "global_batch_size": 8,
                "progress": False,
                "prefix_chunk": 4,
                **settings,
            },
        ) as trainer,
    ):
        trainer.fit()
        return trainer, trainer.state_dict()


def build_classifier() -> nn.Module:
    torch.manual_seed(0)
    return classifier().double()


@pytest.mark.parametrize(
    ("build", "data", "settings"),
    [
        (build_classifier, Sentences, {}),
        (tiny_model, Augmented, {"loss_fn": nn.CrossEntropyLoss(), "cache_views": 2}),
    ],
    ids=["short sentences", "augmented views"],
)
def test_cached_equals_uncached_bit_by_bit(
    build: Callable[[], nn.Module], data: Callable[[], Any], settings: dict[str, Any]
) -> None:
    trainer, cached = train(build(), data(), **settings)
    _, computed = train(build(), data(), cache=False, **settings)
    assert trainer.report.cache_hits > 0
    for name, tensor in computed.items():
        assert torch.equal(cached[name], tensor), name


def test_a_short_sentence_touches_only_its_own_bytes() -> None:
    with (
        measuring(freely),
        Trainer(
            build_classifier(), Sentences(), freeze=FreezeSchedule([1]), epochs=2,
            global_batch_size=8, progress=False,
        ) as trainer,
    ):  # fmt: skip
        for _ in range(NUM_SENTENCES // 8):
            trainer.step()
        store = trainer._feed._store
        assert store is not None
        words = store._parts[0][1].view(torch.float64).view(NUM_SENTENCES, LENGTH, -1)
        lengths = Sentences().mask.sum(1)
        for row, length in zip(words, lengths.tolist(), strict=True):
            assert row[:length].abs().sum(1).min() > 0
            assert row[length:].abs().sum() == 0


def test_random_augmentation_trains_uncached_unless_its_views_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, found = train(tiny_model(), Augmented(), loss_fn=nn.CrossEntropyLoss())
    assert [r.message for r in caplog.records if "(random augmentation)" in r.message]
    assert trainer.report.cache_hits == 0 and trainer.report.cache_bytes == 0
    assert trainer.decision is not None and not trainer.decision.use_cache
    _, wanted = train(tiny_model(), Augmented(), loss_fn=nn.CrossEntropyLoss(), cache=False)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_views_are_the_training_set_s_alone() -> None:
    with (
        measuring(freely),
        Trainer(
            tiny_model(),
            Augmented(),
            eval_dataset=tiny_data(),
            loss_fn=nn.CrossEntropyLoss(),
            freeze=FreezeSchedule([1]),
            epochs=6,
            cache_views=2,
            progress=False,
        ) as trainer,
    ):
        trainer.fit()
        feeds = trainer._feed, trainer._evaluator.feed
        stores = [feed._store for feed in feeds if feed is not None]
        sizes = [store.num_rows for store in stores if store is not None]
    assert sizes == [2 * len(tiny_data()), len(tiny_data())]


def test_the_cache_s_bytes_are_said_without_a_progress_bar_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    train(tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss())
    assert [r.message for r in caplog.records if "the cache takes up to about" in r.message]


def test_rounded_activations_are_the_same_in_every_epoch_and_near_the_exact_ones() -> None:
    losses: dict[str | None, list[float]] = {}
    for dtype in (None, "bfloat16", "float16"):
        with (
            measuring(freely),
            Trainer(
                tiny_model(dtype=torch.float32),
                tiny_data(dtype=torch.float32),
                loss_fn=nn.CrossEntropyLoss(),
                optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0),
                freeze=FreezeSchedule([2]),
                epochs=3,
                global_batch_size=26,
                progress=False,
                cache_dtype=dtype,
            ) as trainer,
        ):
            losses[dtype] = [trainer.step().loss for _ in range(3)]
        assert trainer.report.cache_hits == 2 * 26
    for dtype, error in (("bfloat16", 2e-2), ("float16", 2e-3)):
        filling, *reading = losses[dtype]
        assert reading == pytest.approx([filling] * 2, rel=1e-6)
        assert filling == pytest.approx(losses[None][0], rel=error)
        assert filling != losses[None][0]


def test_evaluation_reads_rows_too_and_finds_what_it_would_compute() -> None:
    found = {}
    for cache in (True, False):
        evaluated = Sentences()
        trainer, _ = train(build_classifier(), Sentences(), eval_dataset=evaluated, cache=cache)
        found[cache] = trainer.report.metrics
        reads = evaluated.reads
        # The first of six evaluations fills rows, as does the fourth, by running one more layer.
        assert reads < 3 * NUM_SENTENCES if cache else reads >= 6 * NUM_SENTENCES
    assert found[True] == pytest.approx(found[False], rel=1e-12)


@pytest.mark.parametrize(("epochs", "is_cached"), [(3, False), (4, True), (9, True)])
def test_rows_that_would_not_be_read_again_are_not_written(epochs: int, is_cached: bool) -> None:
    # Frozen from the third epoch on.
    trainer, _ = train(
        build_classifier(), Sentences(), epochs=epochs, freeze=FreezeSchedule([0, 0, 2])
    )
    assert trainer.decision is not None and trainer.decision.use_cache == is_cached
    assert (trainer.report.cache_hits > 0) == is_cached

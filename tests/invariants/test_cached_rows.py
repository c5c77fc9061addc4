"""Cached equals uncached whatever rows hold: short sentences, views, rounded activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from autocache import RowStore
from autocache.layout import FileShape, round_up
from autopipe.profile import Profile
from freeze import FreezeSchedule, Linear
from pipetransformer import Trainer
from tests.helpers.adapted import LENGTH, classifier
from tests.helpers.feeds import NUM_SENTENCES, Sentences
from tests.helpers.inspection import evaluation_feed_of, feed_of, store_of
from tests.helpers.measured import freely, measuring, never
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer


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


def test_short_sentences_in_int8_are_rounded_alike_whether_they_have_rows_or_not() -> None:
    trainer, all_kept = train(build_classifier(), Sentences(), cache_dtype="int8")
    limited, some_kept = train(
        build_classifier(), Sentences(), cache_dtype="int8", cache_limit_bytes=NUM_SENTENCES * 60
    )
    assert 0 < limited.report.cache_hits < trainer.report.cache_hits
    for name, tensor in all_kept.items():
        assert torch.equal(some_kept[name], tensor), name


def test_a_short_sentence_takes_only_its_own_bytes() -> None:
    with (
        measuring(freely),
        Trainer(
            build_classifier(), Sentences(), freeze=FreezeSchedule([1]), epochs=2,
            global_batch_size=8, progress=False,
        ) as trainer,
    ):  # fmt: skip
        for _ in range(NUM_SENTENCES // 8):
            trainer.step()
        store = store_of(trainer)
        assert isinstance(store, RowStore)
        hidden = store.layout.fields[0]
        lengths, token_bytes = Sentences().mask.sum(1), hidden.num_bytes // LENGTH
        own = sum(round_up(length * token_bytes, 64) for length in lengths.tolist())
        empty = FileShape(store.layout, NUM_SENTENCES).rows_start
        taken = store.num_bytes - empty - NUM_SENTENCES * store.layout.fixed_bytes
        # Beside them the rest of an extent.
        assert own <= taken < own + 2 * store.layout.row_bytes
        rows = store.read(torch.arange(NUM_SENTENCES), [*feed_of(trainer).prefix.stamps]).rows
        for row, length in zip(rows[hidden.name], lengths.tolist(), strict=True):
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
        tiny_trainer(
            data=Augmented(),
            eval_dataset=tiny_data(),
            freeze=FreezeSchedule([1]),
            epochs=6,
            cache_views=2,
        ) as trainer,
    ):
        trainer.fit()
        feeds = feed_of(trainer), evaluation_feed_of(trainer)
        stores = [feed.keeper.store for feed in feeds if feed is not None]
        sizes = [store.num_rows for store in stores if store is not None]
    assert sizes == [2 * len(tiny_data()), len(tiny_data())]


@pytest.mark.parametrize(
    ("limit_bytes", "num_rows", "freeze"),
    [(None, 26, FreezeSchedule([0, 2, 2])), (1400, 21, FreezeSchedule([2])), (None, 26, Linear())],
    ids=["all", "some", "a policy decides"],
)
def test_what_rows_take_and_save_is_said_before_the_first_step(
    limit_bytes: int | None, num_rows: int, freeze: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = {"epochs": 3, "freeze": freeze, "cache_limit_bytes": limit_bytes}
    with measuring(freely), tiny_trainer(**settings) as trainer:
        trainer.step()
        costs = trainer.measurements
    (said,) = [r.message for r in caplog.records if "the cache will have" in r.message]
    assert f"rows of {num_rows} of 26 samples, about " in said
    if not isinstance(freeze, FreezeSchedule):
        assert said.endswith("are free")
        return
    assert costs is not None
    whole = sum(one.forward_s[-1] + one.backward_s[-1] for one in costs.sublayers)
    frozen = [one for one in costs.sublayers if one.layer < 2]
    prefix = sum(one.frozen_s[-1] for one in frozen)
    above = whole - sum(one.forward_s[-1] + one.backward_s[-1] for one in frozen)
    steps = [whole if not freeze.at(epoch) else prefix + above for epoch in range(3)]
    # The first epoch with frozen layers fills rows.
    saved = (sum(map(bool, map(freeze.at, range(3)))) - 1) * prefix / sum(steps)
    assert f"; this saves about {100 * saved * num_rows / 26:.0f} % of 3 epochs" in said


def test_that_a_limit_leaves_no_rows_is_said_before_the_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with tiny_trainer(freeze=FreezeSchedule([1]), cache_limit_bytes=100) as trainer:
        trainer.step()
    text = "no cache: cache_limit_bytes=100 has room for less than a tenth of the rows of 26 sam"
    assert [one.startswith(text) for one in caplog.messages if "rows of 26" in one] == [True]


def test_rounded_activations_are_the_same_in_every_epoch_and_near_the_exact_ones() -> None:
    losses: dict[str | None, list[float]] = {}
    for dtype in (None, "bfloat16", "float16"):
        with (
            measuring(freely),
            tiny_trainer(
                tiny_model(dtype=torch.float32),
                tiny_data(dtype=torch.float32),
                optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0),
                freeze=FreezeSchedule([2]),
                epochs=3,
                global_batch_size=26,
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


EPOCHS = 3


def slowly(*arguments: Any, **options: Any) -> Profile:
    """Find that a cache is slower than computing."""
    measured = never(*arguments, **options)
    return dataclasses.replace(measured, cache_bytes_per_s=1.0)


def train_rounding(
    model: nn.Module, data: TensorDataset, **settings: Any
) -> tuple[list[float], int]:
    """Train with one frozen layer; evaluate two data sets of the same samples, too."""
    found = []
    with Trainer(
        model,
        data,
        eval_dataset=data,
        loss_fn=nn.CrossEntropyLoss(),
        freeze=lambda context: 1,
        epochs=EPOCHS,
        global_batch_size=8,
        evaluate_every_epochs=0,
        **settings,
    ) as trainer:
        while not trainer.is_over:
            found.append(trainer.step().loss)
            if trainer.epoch.is_integer():
                found.append(trainer.evaluate()["loss"])
                other = trainer.evaluate(TensorDataset(*data.tensors))
                assert other["loss"] == pytest.approx(found[-1], rel=1e-12)
    return found, trainer.report.cache_hits


def of_tokens() -> nn.Module:
    """Build the tiny model for four tokens a sample."""
    model = tiny_model()
    head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 8, 3)).double()
    return nn.Sequential(*model[:-1], head)


def tokens() -> TensorDataset:
    x, y = tiny_data().tensors
    return TensorDataset(x[:, None] * torch.arange(1.0, 5.0)[:, None].double(), y)


@pytest.mark.parametrize(
    ("build", "make", "dtype"), [(tiny_model, tiny_data, "float16"), (of_tokens, tokens, "int8")]
)
def test_rounding_does_not_depend_on_whether_rows_are_kept(
    build: Callable[[], nn.Module], make: Callable[[], TensorDataset], dtype: str
) -> None:
    # How fast a disk read decided what was rounded, so that clocks changed what was learned.
    torch.manual_seed(0)
    model, data = build(), make()
    with measuring(never):
        kept, num_hits = train_rounding(deepcopy(model), data, cache_dtype=dtype)
        exact, _ = train_rounding(deepcopy(model), data)
    with measuring(slowly):
        computed, no_hits = train_rounding(deepcopy(model), data, cache_dtype=dtype)
    assert num_hits > 0 == no_hits
    assert kept == pytest.approx(computed, rel=1e-12)
    assert kept != pytest.approx(exact, rel=1e-6)


def test_int8_is_refused_with_a_warning_where_a_sample_has_no_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with measuring(never):
        refused, num_hits = train_rounding(tiny_model(), tiny_data(), cache_dtype="int8")
    assert num_hits == 0
    assert refused == train_rounding(tiny_model(), tiny_data(), cache=False)[0]
    assert "cache_dtype='int8': int8 has one scale for each token" in caplog.text


def test_tokens_that_a_frozen_layer_hands_on_are_not_rounded() -> None:
    # They were rounded like activations: beyond the 256th other words were trained.
    num_words, generator = 5000, torch.Generator().manual_seed(1)
    tokens = torch.randint(num_words, (16, 4), generator=generator)
    data = TensorDataset(tokens, torch.randint(3, (16,), generator=generator))

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 4, 3))
        words = nn.Embedding(num_words, 8)
        return nn.Sequential(nn.Identity(), words, nn.Tanh(), head).double()

    with measuring(never):
        rounded, num_hits = train_rounding(build(), data, cache_dtype="bfloat16")
        assert rounded == train_rounding(build(), data, cache=False)[0]
    assert num_hits > 0

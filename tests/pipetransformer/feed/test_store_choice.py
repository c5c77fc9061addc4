"""Prove where a cache's rows go, and that a run on a GPU's rows trains as one without."""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from autocache import (
    ActivationStore,
    DeviceStore,
    RowField,
    RowLayout,
    RowStore,
    TieredStore,
    WriteBehind,
    device_bytes,
)
from freeze import FreezeSchedule
from pipetransformer import Trainer
from pipetransformer.config import TrainConfig
from pipetransformer.feed import RowBudget
from pipetransformer.feed import node_store as store_choice
from pipetransformer.feed.fetch_forecast import Follower, with_later
from pipetransformer.processes.world import connect
from pipetransformer.report.run_log import _cache_text
from pipetransformer.stage import BatchCut
from tests.helpers.adapted import classifier
from tests.helpers.feeds import (
    ALONE,
    Feed,
    Sentences,
    assert_fetch,
    counts,
    leave_rows_unchecked,
    put_half_on_device,
)
from tests.helpers.inspection import evaluation_feed_of, feed_of, store_of
from tests.helpers.marks import slow
from tests.helpers.measured import freely, measuring
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool
from tests.helpers.stand_in_gpu import CUDA, put_on_gpu, stand_in_gpu
from tests.helpers.texts import pad_to_longest, sentences, tiny_bert


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have as many bytes free on the device, which is the host's memory."""
    made = [1 << 30]
    monkeypatch.setattr(store_choice, "room_on_device", lambda _: made[0])
    leave_rows_unchecked(monkeypatch)
    return made


def let_cpus_be_asked(patch: pytest.MonkeyPatch) -> None:
    """Let `cache_device="cuda"` mean the device that computes, whichever it is."""
    patch.setattr("pipetransformer.feed.row_keeper.check_device", lambda *_: None)


def assert_rows_of_all_depths(feed: Feed) -> None:
    """Fetch what was computed, read, extended and computed anew; then close."""
    assert_fetch(feed, 2, (0, 0, 5))
    assert_fetch(feed, 2, (5, 0, 0))
    feed.set_depth(3)
    assert_fetch(feed, 3, (0, 5, 0))
    feed.set_depth(1)
    assert_fetch(feed, 1, (0, 0, 5))
    feed.samples.close()


def test_auto_takes_the_device_where_all_rows_have_room(tmp_path: Path, room: list[int]) -> None:
    feed = Feed(tmp_path)
    feed.set_depth(2)
    assert isinstance(feed.samples.keeper.store, DeviceStore)
    assert_rows_of_all_depths(feed)


def sizes_of(store: ActivationStore | None) -> list[tuple[type, int]]:
    """Return the kind of each tier, and how many rows it has."""
    tiers = store.tiers if isinstance(store, TieredStore) else (store,)
    return [(type(tier), tier.num_rows) for tier in tiers if tier is not None]


@pytest.mark.parametrize("lacking", [0, 1, 13, -3, -2])
def test_auto_puts_what_does_not_fit_the_device_into_the_file(
    tmp_path: Path, room: list[int], lacking: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    num = len(tiny_data())
    num_fitting = num - lacking if lacking >= 0 else -lacking
    feed = Feed(tmp_path)
    feed.set_depth(2)
    store = feed.samples.keeper.store
    assert store is not None
    room[0] = (num_fitting + 1) * device_bytes(store.layout, 1) - 1
    feed.samples.close()
    caplog.clear()
    feed = Feed(tmp_path)
    feed.set_depth(2)
    # A device for less than a tenth of the rows is not worth the trouble.
    alone = {num: [(DeviceStore, num)], 2: [(RowStore, num)]}.get(num_fitting)
    mixed = [(DeviceStore, num_fitting), (RowStore, num - num_fitting)]
    assert sizes_of(feed.samples.keeper.store) == (alone or mixed)
    account = (
        rf"rows of {num} of {num} samples, about \S+ \S+"
        rf": {num_fitting} in cpu's memory \(.+\), {num - num_fitting} in {tmp_path} \(.+\)$"
    )
    assert bool(re.search(account, caplog.messages[0])) == (alone is None)
    assert_rows_of_all_depths(feed)


@pytest.mark.parametrize(
    ("limit_bytes", "sizes"),
    [
        (3200, [(RowStore, 10)]),
        (7680, [(RowStore, 24)]),
        (7680 + 6 * 768, [(DeviceStore, 6), (RowStore, 18)]),
        (24 * 1088, [(DeviceStore, 24)]),
    ],
)
def test_the_longest_on_the_device_cost_no_other_row_its_place_within_the_limit(
    tmp_path: Path, room: list[int], limit_bytes: int, sizes: list[tuple[type, int]]
) -> None:
    hidden = RowField("hidden", (64, 4), torch.float32, varies=True)
    layout = RowLayout((hidden, RowField("y", (), torch.int64)), mean_length=16.0)
    assert (layout.expected_bytes, layout.row_bytes) == (320, 1088)
    config = TrainConfig(cache_folder=tmp_path, cache_limit_bytes=limit_bytes)
    store = store_choice.make_store(ALONE, config, layout, 24, readers=1)
    assert store is not None and sizes_of(store) == sizes
    store.close()


def test_where_no_folder_has_room_for_the_rest_the_device_has_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_half_on_device(monkeypatch)
    feed, num = Feed(tmp_path / "nowhere"), len(tiny_data())
    feed.set_depth(2)
    assert sizes_of(feed.samples.keeper.store) == [(DeviceStore, num // 2)]
    wanted = f"the cache holds {num // 2} of {num} rows, in the device's memory alone, as "
    assert [message.startswith(wanted) for message in caplog.messages] == [True]
    # Samples of odd numbers have rows, and one of the five has none.
    assert [counts(feed.fetch()[2]) for _ in range(2)] == [(0, 0, 5), (4, 0, 1)]
    feed.samples.close()


def test_cpu_is_a_file_whatever_has_room(tmp_path: Path, room: list[int]) -> None:
    feed = Feed(tmp_path, cache_device="cpu")
    feed.set_depth(2)
    assert isinstance(feed.samples.keeper.store, RowStore)
    feed.samples.close()


def test_a_gpu_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache_device is 'cuda', but this run computes on cpu"):
        Feed(tmp_path, cache_device="cuda")


def refuse_memory(*_: object, **__: object) -> DeviceStore:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_device_that_is_full_after_all_means_host_memory_and_one_warning(
    tmp_path: Path, room: list[int], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(store_choice, "DeviceStore", refuse_memory)
    feed = Feed(tmp_path)
    with caplog.at_level(logging.WARNING):
        feed.set_depth(2)
        feed.set_depth(3)
    assert isinstance(feed.samples.keeper.store, RowStore)
    assert len(caplog.messages) == 1 and "do not fit cpu; cache_dtype=" in caplog.text
    feed.samples.close()


def test_half_of_what_was_never_used_is_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_choice, "plannable_bytes", lambda _: 1000)
    with stand_in_gpu():
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 700)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 300)
        world = replace(ALONE, device=CUDA)
        assert store_choice.room_on_device(world) == 300
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1700)
        assert store_choice.room_on_device(world) == 0


@pytest.mark.parametrize("unit", [None, 1, 3, 8])
def test_a_gpu_has_room_for_the_largest_slice_of_each_batch(
    unit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_choice, "_DEVIATIONS", 0)
    for size, readers in itertools.product(range(unit or 1, 20), range(1, 6)):
        config = TrainConfig(global_batch_size=size, micro_batch_size=unit)
        num_slots = store_choice._num_slots(7 * size, config, readers)
        assert num_slots == 7 * BatchCut(readers, 1, unit).slices(size)[0]


def fetch_in_turn(folder: str, settings: dict[str, Any]) -> tuple[str, list[Any]]:
    """Let each rank fetch twice, in turn; return where rows lie, and what each needed."""
    world = connect("cpu", timeout_s=30.0)
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        leave_rows_unchecked(patch)
        let_cpus_be_asked(patch)
        patch.setattr(store_choice, "room_on_device", lambda _: 1 << 30)
        feed = Feed(Path(folder), world, **settings)
        feed.set_depth(2)
        for rank in range(world.size):
            for _ in range(2 if world.rank == rank else 0):
                batch, _, stats = feed.fetch()
                torch.testing.assert_close(batch["hidden"], feed.expect(2), rtol=1e-12, atol=1e-12)
                found.append(counts(stats))
            dist.barrier()
        kind = type(feed.samples.keeper.store).__name__
        feed.samples.close()
    return kind, found


@pytest.mark.parametrize(
    ("settings", "kind", "second"),
    [
        ({"cache_device": "cuda"}, "DeviceStore", [(0, 0, 5), (5, 0, 0)]),
        ({}, "RowStore", [(5, 0, 0)] * 2),
        ({"cache_folder": ["a", "b"]}, "TieredStore", [(5, 0, 0)] * 2),
    ],
    ids=["each its GPU", "a file", "two files"],
)
def test_of_several_processes_each_keeps_its_own_rows_where_asked_to_and_else_they_share(
    two_ranks: Pool, tmp_path: Path, settings: dict[str, Any], kind: str, second: list[Any]
) -> None:
    if "cache_folder" in settings:
        for name in settings["cache_folder"]:
            (tmp_path / name).mkdir()
        folders = [str(tmp_path / name) for name in settings["cache_folder"]]
        settings = {"cache_folder": folders, "cache_limit_bytes": [1 << 10, 1 << 20]}
    first, other = two_ranks.run(fetch_in_turn, str(tmp_path), settings)
    assert first == (kind, [(0, 0, 5), (5, 0, 0)])
    assert other == (kind, second)


def test_the_last_fetch_of_an_epoch_has_rows_written_for_the_node_s_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed(tmp_path)
    feed.set_depth(2)
    batches = [(0, torch.tensor([0, 1])), (0, torch.tensor([2, 3])), (1, torch.tensor([0, 2]))]
    settled: list[RowStore] = []
    monkeypatch.setattr(RowStore, "settle", lambda store: settled.append(store))
    # The second time the first two are read at once.
    for size, expected in ((1, [0, 0, 0]), (2, [1, 1, 2])):
        feed.samples._world = replace(ALONE, size=size)
        feed.samples._coming = Follower(lambda: with_later(batches))
        counted = []
        for epoch, ids in batches:
            feed.samples.rows(epoch).fetch(ids)
            counted.append(len(settled))
        assert counted == expected
    feed.samples.close()


def sentences_classifier() -> nn.Module:
    torch.manual_seed(0)
    return classifier().double()


LOSS = nn.CrossEntropyLoss()


def trained(
    build: Any, data: Any, num_tiers: int, **settings: Any
) -> tuple[Trainer, dict[str, Tensor]]:
    """Train with layers frozen, thawed, and frozen again."""
    with (
        measuring(freely),
        Trainer(
            build(), data, eval_dataset=data, epochs=6, global_batch_size=8, progress=False,
            prefix_chunk=4, freeze=FreezeSchedule([1, 1, 2, 0, 2, 2]), **settings,
        ) as trainer,
    ):  # fmt: skip
        trainer.fit()
        feeds = (feed_of(trainer), evaluation_feed_of(trainer))
        tiers = [sizes_of(feed.keeper.store) for feed in feeds if feed is not None]
        assert {len(one) for one in tiers} == {num_tiers}
        assert {kind for one in tiers for kind, _ in one[:1]} <= {DeviceStore}
        return trainer, trainer.state_dict()


@pytest.mark.parametrize(
    "case",
    [
        (tiny_model, tiny_data, 500, {"loss_fn": LOSS, "cache_limit_bytes": 1600}),
        (sentences_classifier, Sentences, 4000, {}),
        slow((tiny_model, tiny_data, 500, {"loss_fn": LOSS, "cache_check": "all"})),
    ],
    ids=["some rows", "short sentences", "all checked"],
)
def test_a_run_on_a_device_s_rows_equals_an_uncached_one_bit_by_bit(
    room: list[int], case: tuple[Any, Any, int, dict[str, Any]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    build, data, first_bytes, settings = case
    trainer, cached = trained(build, data(), 1, **settings)
    other, computed = trained(build, data(), 0, cache=False, **settings)
    assert trainer.report.cache_hits > 0 == other.report.cache_hits
    # Half of the rows on the device and half in the file: as many are read.
    put_half_on_device(monkeypatch)
    third, mixed = trained(build, data(), 2, **settings)
    assert third.report.cache_hits == trainer.report.cache_hits
    # And in three places, the last of which has room for what the second has not.
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    limits = {"cache_folder": folders, "cache_limit_bytes": [first_bytes, 1 << 20]}
    fourth, in_three = trained(build, data(), 3, **{**settings, **limits})
    assert fourth.report.cache_hits >= trainer.report.cache_hits
    for name, wanted in computed.items():
        for other_weights in (cached, mixed, in_three):
            assert torch.equal(other_weights[name], wanted), name


def of_texts(data: Any, **settings: Any) -> Trainer:
    """Return a Trainer of a BERT whose first layer is frozen, on texts padded by batch."""
    return Trainer(
        tiny_bert(),
        data,
        optimizer=lambda named: SGD([p for _, p in named], lr=0.1),
        freeze=FreezeSchedule((1,)),
        collate_fn=pad_to_longest,
        progress=False,
        **settings,
    )


def test_the_bytes_announced_are_those_of_rows_of_samples_own_lengths(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # From the shortest to the longest, as files may be.
    data = sorted(sentences(400), key=lambda row: len(row["input_ids"]))
    with of_texts(data, epochs=2, global_batch_size=20) as trainer:
        with caplog.at_level(logging.INFO):
            trainer.fit()
        taken = trainer.report.cache_bytes
    text = r"the cache will have rows of 400 of 400 samples, about ([\d.]+) KiB at most"
    (announced,) = re.findall(text, caplog.text)
    # Rows also hold the mask, targets and checks.
    assert 0.75 * taken < 1024 * float(announced) < 1.1 * taken


def test_the_start_says_where_rows_may_lie() -> None:
    rows, config = RowBudget(4, 4, 64), TrainConfig(cache_folder="nowhere")
    text = "the cache will have rows of 4 of 4 samples, about 64 B at most in"
    assert _cache_text(rows, config, ALONE, None) == f"{text} nowhere"
    on_gpu = f"{text} GPUs' memory, and without room there in nowhere"
    assert _cache_text(rows, config, replace(ALONE, device=CUDA), None) == on_gpu


_NUM, _BATCH = 48, 16


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 5, 2))
    return nn.Sequential(nn.Linear(8, 16), *blocks, head).double()


def make_data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_NUM, 5, 8, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.mean((1, 2)) > 0).long())


@dataclass(frozen=True)
class _Run:
    losses: list[float]
    weights: dict[str, Tensor]
    kind: type
    num_hits: int
    waits: list[int]


def run(**settings: Any) -> _Run:
    """Train with one layer more frozen each epoch; note the waits of each step."""
    model = make_model()
    with stand_in_gpu() as gpu:
        put_on_gpu(model)
        with tiny_trainer(
            model,
            make_data(),
            freeze=lambda context: min(2, context.epoch),
            epochs=4,
            global_batch_size=_BATCH,
            pipeline_length=1,
            **settings,
        ) as trainer:
            losses, waits = [], []
            while not trainer.is_over:
                gpu.reset()
                losses.append(trainer.step().loss)
                waits.append(sum(gpu.waits.values()))
            weights = {name: value.cpu() for name, value in trainer.state_dict().items()}
            num_hits = trainer.report.cache_hits
            return _Run(losses, weights, type(store_of(trainer)), num_hits, waits)


def test_steps_that_fill_grow_and_read_the_cache_wait_for_nothing_and_train_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = run(cache=False)
    on_device = run(cache_device="cuda")
    in_file = run(cache_device="cpu")
    put_half_on_device(monkeypatch)
    in_both = run()
    kinds = [one.kind for one in (computed, on_device, in_file, in_both)]
    assert kinds == [type(None), DeviceStore, WriteBehind, TieredStore]
    # Where an epoch begins and ends it is decided, and looked at the frozen layers.
    inner = range(1, len(on_device.losses), _NUM // _BATCH)
    for one in (on_device, in_file, in_both):
        assert one.losses == computed.losses and one.num_hits == on_device.num_hits
        for name, wanted in computed.weights.items():
            assert torch.equal(one.weights[name], wanted), name
        assert not any(one.waits[step] for step in inner)
    # The second epoch makes rows, the third makes them deeper, the fourth reads them all.
    assert in_both.num_hits == _NUM


def test_a_limit_holds_as_many_texts_as_their_mean_length_allows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half of the samples have rows, which take the limit, and the run ends as one without."""
    caplog.set_level(logging.INFO)
    data, state, limit_bytes = sentences(120), [], 60 * (11 * 16 * 8 + 5 * 64)
    for cache in (True, False):
        settings: dict[str, Any] = {"cache": cache, "cache_limit_bytes": limit_bytes}
        with (
            measuring(freely),
            of_texts(data, epochs=3, global_batch_size=8, **settings) as trainer,
        ):
            trainer.fit()
            if cache:
                store = store_of(trainer)
                assert isinstance(store, RowStore) and 50 < store.num_rows < 75
                found = store.read(torch.arange(120), [*feed_of(trainer).prefix.stamps])
                assert 0.9 * store.num_rows < found.depth.sum() <= store.num_rows
                assert 0.9 * limit_bytes < store.num_bytes < limit_bytes + 4096
                assert 0.4 < trainer.report.cache_hits / 240 < 0.6
                (num, kib) = re.findall(
                    r"the cache has rows of (\d+) of 120 samples, about ([\d.]+) KiB", caplog.text
                )[0]
                assert int(num) == store.num_rows
                assert 0.95 * limit_bytes < 1024 * float(kib) <= 1.01 * limit_bytes
            state.append(trainer.state_dict())
    for name, mine in state[0].items():
        torch.testing.assert_close(mine, state[1][name], rtol=1e-9, atol=1e-12)

"""Prove where a cache's rows go, and that a run on a GPU's rows trains as one without."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from autocache import DeviceStore, RowStore, WriteBehind, device_bytes
from freeze import FreezeSchedule
from pipetransformer import Trainer
from pipetransformer.feed import node_store as store_choice
from pipetransformer.feed.fetch_forecast import Follower, with_later
from pipetransformer.processes.world import connect
from tests.helpers.adapted import classifier
from tests.helpers.feeds import ALONE, Feed, Sentences, assert_fetch, counts, leave_rows_unchecked
from tests.helpers.inspection import evaluation_feed_of, feed_of, store_of
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


def test_auto_takes_the_device_where_all_rows_have_room(tmp_path: Path, room: list[int]) -> None:
    feed = Feed(tmp_path)
    feed.set_depth(2)
    assert isinstance(feed.samples.keeper.store, DeviceStore)
    assert_fetch(feed, 2, (0, 0, 5))
    assert_fetch(feed, 2, (5, 0, 0))
    feed.set_depth(3)
    assert_fetch(feed, 3, (0, 5, 0))
    feed.set_depth(1)
    assert_fetch(feed, 1, (0, 0, 5))
    feed.samples.close()


@pytest.mark.parametrize(("spare", "is_there"), [(-1, False), (0, True)])
def test_auto_leaves_the_device_alone_where_one_byte_is_missing(
    tmp_path: Path, room: list[int], spare: int, is_there: bool
) -> None:
    for _ in range(2):
        feed = Feed(tmp_path)
        feed.set_depth(2)
        store = feed.samples.keeper.store
        feed.samples.close()
        assert store is not None
        room[0] = device_bytes(store.layout, len(tiny_data())) + spare
    assert isinstance(store, DeviceStore if is_there else RowStore)


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
        assert store_choice.room_on_device(CUDA) == 300
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1700)
        assert store_choice.room_on_device(CUDA) == 0


def fetch_in_turn(folder: str, cache_device: str) -> tuple[str, list[Any]]:
    """Let each rank fetch twice, in turn; return where rows lie, and what each needed."""
    world = connect("cpu", timeout_s=30.0)
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        leave_rows_unchecked(patch)
        let_cpus_be_asked(patch)
        patch.setattr(store_choice, "room_on_device", lambda _: 1 << 30)
        feed = Feed(Path(folder), world, cache_device=cache_device)
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
    ("cache_device", "kind", "second"),
    [("cuda", "DeviceStore", [(0, 0, 5), (5, 0, 0)]), ("auto", "RowStore", [(5, 0, 0)] * 2)],
)
def test_of_several_processes_each_keeps_its_own_rows_where_asked_to_and_else_they_share(
    two_ranks: Pool, tmp_path: Path, cache_device: str, kind: str, second: list[Any]
) -> None:
    first, other = two_ranks.run(fetch_in_turn, str(tmp_path), cache_device)
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


def trained(build: Any, data: Any, **settings: Any) -> tuple[Trainer, dict[str, Tensor]]:
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
        kinds = {type(feed.keeper.store) for feed in feeds if feed is not None}
        assert kinds == {DeviceStore if settings.get("cache", True) else type(None)}
        return trainer, trainer.state_dict()


@pytest.mark.parametrize(
    ("build", "data", "settings"),
    [
        (tiny_model, tiny_data, {"loss_fn": nn.CrossEntropyLoss(), "cache_limit_bytes": 1600}),
        (sentences_classifier, Sentences, {}),
    ],
    ids=["some rows", "short sentences"],
)
def test_a_run_on_a_device_s_rows_equals_an_uncached_one_bit_by_bit(
    room: list[int], build: Any, data: Any, settings: dict[str, Any]
) -> None:
    trainer, cached = trained(build, data(), **settings)
    other, computed = trained(build, data(), cache=False, **settings)
    assert trainer.report.cache_hits > 0 == other.report.cache_hits
    for (name, mine), theirs in zip(cached.items(), computed.values(), strict=True):
        assert torch.equal(mine, theirs), name


def test_the_bytes_announced_are_those_of_rows_of_samples_own_lengths(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # From the shortest to the longest, as files may be.
    data = sorted(sentences(400), key=lambda row: len(row["input_ids"]))
    with Trainer(
        tiny_bert(),
        data,
        optimizer=lambda named: SGD([p for _, p in named], lr=0.1),
        freeze=FreezeSchedule((1,)),
        epochs=2,
        global_batch_size=4,
        collate_fn=pad_to_longest,
        progress=False,
    ) as trainer:
        with caplog.at_level(logging.INFO):
            trainer.fit()
        taken = trainer.report.cache_bytes
    text = r"the cache will have rows of 400 of 400 samples, about ([\d.]+) KiB at most"
    (announced,) = re.findall(text, caplog.text)
    # Rows also hold the mask, targets and checks.
    assert 0.75 * taken < 1024 * float(announced) < 1.1 * taken


_NUM, _BATCH = 48, 16


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)
    ]
    head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 5, 2))
    return nn.Sequential(nn.Linear(8, 16), *blocks, head).double()


def make_data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_NUM, 5, 8, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.mean((1, 2)) > 0).long())


def run(**settings: Any) -> tuple[list[float], type, list[int]]:
    """Train with one layer more frozen each epoch; return losses, the store's kind, and waits."""
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
            return losses, type(store_of(trainer)), waits


def test_steps_that_fill_grow_and_read_the_cache_wait_for_nothing_and_train_the_same() -> None:
    on_device, device_kind, device_waits = run(cache_device="cuda")
    in_file, file_kind, file_waits = run(cache_device="cpu")
    computed, no_kind, _ = run(cache=False)
    assert (device_kind, file_kind, no_kind) == (DeviceStore, WriteBehind, type(None))
    assert on_device == in_file == computed
    # Where an epoch begins and ends it is decided, and looked at the frozen layers.
    inner = range(1, len(on_device), _NUM // _BATCH)
    assert [device_waits[step] for step in inner] == [file_waits[step] for step in inner]
    assert not any(device_waits[step] for step in inner)


def test_a_limit_holds_as_many_texts_as_their_mean_length_allows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half of the samples have rows, which take the limit, and the run ends as one without."""
    caplog.set_level(logging.INFO)
    data, state, limit_bytes = sentences(120), [], 60 * (11 * 16 * 8 + 5 * 64)
    for cache in (True, False):
        with measuring(freely), Trainer(
            tiny_bert(),
            data,
            optimizer=lambda named: SGD([p for _, p in named], lr=0.1),
            freeze=FreezeSchedule((1,)),
            epochs=3,
            global_batch_size=8,
            collate_fn=pad_to_longest,
            progress=False,
            cache=cache,
            cache_limit_bytes=limit_bytes,
        ) as trainer:  # fmt: skip
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

"""Prove that a node with little memory for files has its cache elsewhere, or a part of it, that
all nodes agree, and that it is said."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autocache import RowField, RowLayout, RowStore
from pipetransformer.config import TrainConfig
from pipetransformer.feed.node_store import share_files
from pipetransformer.processes import World
from tests.helpers.pool import Pool

LAYOUT = RowLayout((RowField("hidden", (64,), torch.float32),))
NUM_ROWS, ROW_BYTES = 1000, 256
ALONE = World(0, 1, 1, torch.device("cpu"), None, owned=False)
AMPLE = 1 << 30
SMALL = NUM_ROWS * ROW_BYTES // 2

_Usage = namedtuple("_Usage", "total used free")
_System = namedtuple("_System", "f_bavail f_frsize")


def bound(patch: pytest.MonkeyPatch, folder: Path, free: Mapping[str, int]) -> None:
    """Make a folder for memory, the default, and one for temporary files, with so much free."""
    for name in ("memory", "disk"):
        (folder / name).mkdir(exist_ok=True)
    patch.setattr(TrainConfig, "cache_folder", str(folder / "memory"))
    patch.setattr(tempfile, "tempdir", str(folder / "disk"))

    def free_at(path: str) -> int:
        return next(num for name, num in free.items() if path.startswith(str(folder / name)))

    def reserve(descriptor: int, _: int, num_bytes: int) -> None:
        if num_bytes > free_at(os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(errno.ENOSPC, "No space left on device")
        if os.fstat(descriptor).st_size < num_bytes:
            os.ftruncate(descriptor, num_bytes)

    patch.setattr(os, "posix_fallocate", reserve)
    patch.setattr(shutil, "disk_usage", lambda path: _Usage(0, 0, free_at(str(path))))


def shared(world: World, folder: Path, layout: RowLayout, num_rows: int) -> RowStore | None:
    """Share a store in one folder."""
    return next(iter(share_files(world, {folder: None}, layout, num_rows).values()), None)


def share(folder: Path) -> tuple[int, list[str]] | None:
    """Share a store; return its rows, and the folders in which this process has mapped it."""
    store = shared(ALONE, folder, LAYOUT, NUM_ROWS)
    if store is None:
        return None
    ids = torch.arange(store.num_rows)
    rows = {"hidden": torch.rand(len(ids), 64)}
    store.write(ids, 1, rows)
    assert store.read(ids, [1]).depth.all()
    found = store.num_rows, mapped(folder.parent)
    store.close()
    assert not any(os.listdir(folder.parent / name) for name in ("memory", "disk"))
    return found


def mapped(folder: Path) -> list[str]:
    """Return below which folders of a folder this process has mapped a file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.partition(str(folder))[2] for line in lines if str(folder) in line]
    return sorted({path.split("/")[1] for path in paths})


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.WARNING)
    return caplog.messages


def test_where_there_is_room_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    bound(monkeypatch, tmp_path, {"memory": AMPLE, "disk": 0})
    assert share(tmp_path / "memory") == (NUM_ROWS, ["memory"])
    assert warnings == []


def test_a_default_folder_that_is_too_small_is_replaced_by_a_disk_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound(monkeypatch, tmp_path, {"memory": SMALL, "disk": AMPLE})
    assert share(tmp_path / "memory") == (NUM_ROWS, ["disk"])
    (message,) = caplog.messages
    assert message.startswith(f"the cache holds 1000 of 1000 rows, in {tmp_path}/disk, as ")
    assert f"{tmp_path}/memory and could not get them" in message
    assert "cache_folder= names another place" in message


@pytest.mark.parametrize(
    ("free", "limits", "num_rows"),
    [
        ((SMALL, AMPLE), (None, None), (600, 400)),
        ((AMPLE, AMPLE), (100 * ROW_BYTES, None), (100, 900)),
        ((AMPLE, AMPLE), (100 * ROW_BYTES, 200 * ROW_BYTES), (100, 200)),
        ((0, AMPLE), (None, None), (1000,)),
    ],
)
def test_the_next_folder_takes_what_one_before_has_no_room_for_and_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    free: tuple[int, int], limits: tuple[int | None, int | None], num_rows: tuple[int, ...],
) -> None:  # fmt: skip
    bound(monkeypatch, tmp_path, dict(zip(("memory", "disk"), free, strict=True)))
    folders = [tmp_path / name for name in ("memory", "disk")]
    files = share_files(ALONE, dict(zip(folders, limits, strict=True)), LAYOUT, NUM_ROWS)
    held = {name: file.num_rows for name, file in files.items()}
    if free[0] == SMALL:
        num_rows = int(0.75 * SMALL) // (ROW_BYTES + 64), NUM_ROWS - held[str(folders[0])]
    assert held == dict(zip(map(str, folders[-len(num_rows) :]), num_rows, strict=True))
    assert caplog.messages == []
    for file in files.values():
        file.close()


def test_where_all_folders_have_too_little_room_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound(monkeypatch, tmp_path, {"memory": SMALL, "disk": SMALL})
    folders = [tmp_path / name for name in ("memory", "disk")]
    files = share_files(ALONE, dict.fromkeys(folders), LAYOUT, NUM_ROWS, limit_bytes=1 << 20)
    held = sum(file.num_rows for file in files.values())
    (message,) = caplog.messages
    assert message.startswith(
        f"the cache holds {held} of 1000 rows, in {folders[0]} and {folders[1]}"
    )
    assert "memory and could not get them" in message and "disk and could not" in message
    for file in files.values():
        file.close()


def test_a_disk_is_not_filled_to_the_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound(monkeypatch, tmp_path, {"memory": 0, "disk": NUM_ROWS * (ROW_BYTES + 64) + 8192})
    rows, places = share(tmp_path / "memory") or (0, [])
    assert 0.7 * NUM_ROWS < rows < NUM_ROWS and places == ["disk"]
    assert f"the cache holds {rows} of 1000 rows" in caplog.text
    assert f"{tmp_path}/disk has room for {rows} rows" in caplog.text


@pytest.mark.parametrize("chosen", [False, True])
def test_a_share_of_the_rows_is_kept_where_no_place_has_room_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, chosen: bool
) -> None:
    bound(monkeypatch, tmp_path, {"memory": SMALL, "disk": AMPLE if chosen else 0})
    if chosen:
        # A folder that the user names is never replaced, whatever room there is elsewhere.
        monkeypatch.setattr(TrainConfig, "cache_folder", "/another")
    rows, places = share(tmp_path / "memory") or (0, [])
    assert 0.25 * NUM_ROWS < rows < 0.5 * NUM_ROWS and places == ["memory"]
    (message,) = caplog.messages
    assert message.startswith(f"the cache holds {rows} of 1000 rows, in {tmp_path}/memory, as ")


def test_without_room_for_a_tenth_there_is_no_cache_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound(monkeypatch, tmp_path, {"memory": SMALL // 8, "disk": SMALL // 8})
    assert share(tmp_path / "memory") is None
    (message,) = caplog.messages
    assert message.startswith("no cache: ") and "is computed at every step" in message


TEXTS = RowLayout((RowField("hidden", (64, 8), torch.float32, varies=True),), mean_length=16.0)
"""Rows of a quarter of the longest one's 2,048 bytes."""


def with_free(patch: pytest.MonkeyPatch, *free: int) -> None:
    """Let files that are made now find so many bytes free, each in its turn."""
    turns = iter(free)
    patch.setattr(os, "fstatvfs", lambda _: _System(next(turns), 1))


def test_room_is_counted_by_the_expected_length_of_unequal_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    bound(monkeypatch, tmp_path, {"memory": AMPLE, "disk": AMPLE})
    with_free(monkeypatch, 600 * NUM_ROWS)
    store = shared(ALONE, tmp_path / "memory", TEXTS, NUM_ROWS)
    assert store is not None and store.num_rows == NUM_ROWS and warnings == []
    assert mapped(tmp_path) == ["memory"]
    store.close()


def test_memory_without_room_for_the_expected_rows_is_replaced_by_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound(monkeypatch, tmp_path, {"memory": AMPLE, "disk": AMPLE})
    with_free(monkeypatch, 500 * NUM_ROWS, AMPLE)
    store = shared(ALONE, tmp_path / "memory", TEXTS, NUM_ROWS)
    assert store is not None and store.num_rows == NUM_ROWS
    assert mapped(tmp_path) == ["disk"] and f"in {tmp_path}/disk, as" in caplog.messages[0]
    store.close()


def test_a_share_of_unequal_rows_is_chosen_by_the_expected_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound(monkeypatch, tmp_path, {"memory": 300 * NUM_ROWS, "disk": 0})
    with_free(monkeypatch, 300 * NUM_ROWS, 300 * NUM_ROWS)
    store = shared(ALONE, tmp_path / "memory", TEXTS, NUM_ROWS)
    assert store is not None and store.num_rows == int(0.75 * 300 * NUM_ROWS) // (512 + 64)
    assert caplog.messages[0].startswith(f"the cache holds {store.num_rows} of 1000 rows")
    store.close()


def share_unevenly(folder: str, free: list[Mapping[str, int]]) -> dict[str, Any]:
    """Share a store as a node of one process; say what this one has, and what was gathered."""
    rank, found, own = dist.get_rank(), [], Path(folder) / str(dist.get_rank())
    own.mkdir()
    world = World(rank, 2, 1, torch.device("cpu"), dist.group.WORLD, owned=False)
    handler, logger = logging.Handler(), logging.getLogger("pipetransformer")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            bound(patch, own, free[rank])
            gather, collectives = dist.all_gather, []

            def counting(*arguments: Any, **settings: Any) -> Any:
                collectives.append(1)
                return gather(*arguments, **settings)

            patch.setattr(dist, "all_gather", counting)
            store = shared(world, own / "memory", LAYOUT, NUM_ROWS)
    finally:
        logger.removeHandler(handler)
    answer = {
        "rows": store and store.num_rows,
        "places": mapped(own),
        "warnings": found,
        "collectives": len(collectives),
    }
    if store is not None:
        store.close()
    return answer


def test_nodes_with_unequal_room_agree_on_the_rows_of_the_tightest(
    two_ranks: Pool, tmp_path: Path
) -> None:
    free = [{"memory": AMPLE, "disk": AMPLE}, {"memory": SMALL, "disk": 0}]
    first, second = two_ranks.run(share_unevenly, str(tmp_path), free)
    assert first["rows"] == second["rows"] and 0.25 * NUM_ROWS < first["rows"] < 0.5 * NUM_ROWS
    assert first["places"] == second["places"] == ["memory"]
    assert len(first["warnings"]) == 1 and second["warnings"] == []
    assert first["collectives"] == second["collectives"] == 8  # Four gatherings of two each.


def test_a_node_goes_to_its_disk_while_another_keeps_its_memory(
    two_ranks: Pool, tmp_path: Path
) -> None:
    free = [{"memory": AMPLE, "disk": AMPLE}, {"memory": SMALL, "disk": AMPLE}]
    first, second = two_ranks.run(share_unevenly, str(tmp_path), free)
    assert first["rows"] == second["rows"] == NUM_ROWS
    assert (first["places"], second["places"]) == (["memory"], ["disk"])
    assert f"in {tmp_path}/1/disk, as" in first["warnings"][0] and second["warnings"] == []
    assert first["collectives"] == second["collectives"] == 4


def test_a_node_without_room_means_no_cache_on_any(two_ranks: Pool, tmp_path: Path) -> None:
    free = [{"memory": AMPLE, "disk": AMPLE}, {"memory": 0, "disk": 0}]
    first, second = two_ranks.run(share_unevenly, str(tmp_path), free)
    assert first["rows"] is second["rows"] is None
    assert first["places"] == second["places"] == []
    assert first["warnings"][0].startswith("no cache: ") and second["warnings"] == []


def test_a_store_that_a_rank_cannot_open_means_no_cache_and_is_not_tried_again(
    two_ranks: Pool, tmp_path: Path
) -> None:
    for found in two_ranks.run(open_nothing, str(tmp_path)):
        assert found == [True, 1]


def open_nothing(folder: str) -> list[Any]:
    """Share a store of a node of two of which rank 1 cannot open any; count the attempts."""
    world = World(dist.get_rank(), 2, 2, torch.device("cpu"), dist.group.WORLD, owned=False)
    tried: list[int] = []

    def refuse(*_: Any) -> RowStore:
        tried.append(1)
        raise OSError(errno.EACCES, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowStore, "open", refuse)
        store = shared(world, folder, LAYOUT, NUM_ROWS)
    return [store is None, len(tried) if dist.get_rank() else 1]

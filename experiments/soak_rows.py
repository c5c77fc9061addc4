"""Kill processes that write kept rows into one folder, and see whether a wrong row is ever read.

    python -m experiments.soak_rows --kills 200

Four processes share a folder. Each walks through the samples in an order of its own, reads the
rows that are there, and compares every number. The one that has the set's lock writes those that
are not there. Each opens the set anew in each round, so that others come to write, too. The one
that writes, or any other, is killed after a random time, and another one takes its place. Rows are
large, so that many kills hit a write. Now and then a row is emptied, as if its sample had changed,
so that there is always something to write.

    kills
    wrong_rows     rows that were read and differ from what was written: must be 0
    hangs          processes that made no round in 60 s: must be 0
    writers        processes that came to write: must be more than one
    written        rows that were written in all
    whole          of all rows, those that the next run finds when all processes are dead
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
from torch import Tensor

from autocache import KeptRows, KeptStore, RowField, RowLayout, RowSets

NUM_PROCESSES, NUM_ROWS, STAMPS = 4, 64, (0x77,)
LAYOUT = RowLayout((RowField("hidden", (64, 1024), torch.float32), RowField("y", (), torch.int64)))
_HANG_S, _MOST_WAIT_S = 60.0, 0.2
_EMPTIED = 8
"""Rows that a process empties in each round."""


def rows_of(ids: Tensor) -> dict[str, Tensor]:
    """Return what the rows of samples hold: all numbers differ from sample to sample."""
    start = torch.arange(64 * 1024, dtype=torch.float32).view(64, 1024)
    return {"hidden": start + 0.5 * ids[:, None, None], "y": ids * 3}


def open_store(folder: Path) -> KeptStore:
    kept = KeptRows(RowSets(folder), {"data": "soak"}, {})
    store = KeptStore(kept, LAYOUT, NUM_ROWS, stamp=STAMPS[0])
    store.trust(STAMPS[0])
    return store


def walk(folder: Path, notes: Path, seed: int) -> None:
    """Read, compare and write rows until killed; note rounds, writes and wrong rows."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    written = wrong = 0
    while True:
        store = open_store(folder)
        for ids in torch.randperm(NUM_ROWS, generator=generator).split(8):
            read = store.read(ids, STAMPS)
            found = read.depth > 0
            expected = rows_of(ids)
            differs = (read.rows["hidden"] != expected["hidden"]).flatten(1).any(1)
            wrong += int((found & (differs | (read.rows["y"] != expected["y"]))).sum())
            missing = ids[~found]
            if len(missing):
                store.write(missing, STAMPS[0], rows_of(missing))
                written += len(missing) * store.is_writable
            with notes.open("a") as file:
                file.write(f"{written} {wrong}\n")
        store.clear(torch.randperm(NUM_ROWS, generator=generator)[:_EMPTIED])
        store.close()


def soak(folder: Path, *, kills: int, seed: int = 0) -> dict[str, int]:
    """Kill processes at random moments; return the counts above."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["autocache"])
    rows, draw = folder / "rows", random.Random(seed)
    processes: list[tuple[ForkServerProcess, Path]] = []
    notes: list[Path] = []
    hangs = 0

    def start() -> None:
        note = folder / f"notes-{len(notes)}"
        process = context.Process(target=walk, args=(rows, note, len(notes)), daemon=True)
        process.start()
        notes.append(note)
        processes.append((process, note))

    try:
        for _ in range(NUM_PROCESSES):
            start()
        for _ in range(kills):
            place = draw.randrange(NUM_PROCESSES)
            process, note = processes.pop(place)
            hangs += not _makes_rounds(process, note)
            time.sleep(draw.uniform(0.0, _MOST_WAIT_S))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            start()
        hangs += sum(not _makes_rounds(process, note) for process, note in processes)
    finally:
        for process, _ in processes:
            process.kill()
            process.join()
    # The last line may be torn.
    lines = [note.read_text().split("\n")[:-1] for note in notes if note.exists()]
    found = [[*map(int, one[-1].split())] for one in lines if one]
    store = open_store(rows)
    whole = int((store.read(torch.arange(NUM_ROWS), STAMPS).depth > 0).sum())
    store.close()
    return {
        "kills": kills,
        "wrong_rows": sum(wrong for _, wrong in found),
        "hangs": hangs,
        "writers": sum(written > 0 for written, _ in found),
        "written": sum(written for written, _ in found),
        "whole": whole,
    }


def _makes_rounds(process: ForkServerProcess, note: Path) -> bool:
    """Wait until a process has written its next note; False if it does not, or has failed."""
    before = note.stat().st_mtime_ns if note.exists() else 0
    deadline = time.monotonic() + _HANG_S
    while time.monotonic() < deadline and process.is_alive():
        if note.exists() and note.stat().st_mtime_ns > before:
            return True
        time.sleep(0.005)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), kills=options.kills)
    print(json.dumps(found))
    return 1 if found["wrong_rows"] or found["hangs"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Share a cache's file on a node: one process creates it, all of the node open it.

It has no name where the platform allows for that, and loses it at once where not: whatever happens
to the run, nothing is left behind.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from pathlib import Path

from autocache import NamelessFilesError, RowLayout, RowStore
from autodp import gather_json
from pipetransformer.processes import World

_LOGGER = logging.getLogger(__name__)


def share_store(
    world: World, folder: str | Path, layout: RowLayout, num_rows: int
) -> RowStore | None:
    """Create a store on every node; None on all ranks, warned of, where one has no room for it.

    Collective.
    """
    leader = world.rank % world.slots_per_node == 0
    store, path, failure = None, "", ""
    if leader:
        try:
            store = _create(Path(folder), layout, num_rows)
            path = str(store.path)
        except OSError as error:
            failure = str(error)
    with ExitStack() as undone:  # Where another rank is gone.
        if store is not None:
            undone.callback(store.close)
            undone.callback(store.unlink)
        answers = gather_json([path, failure], group=world.group)
        undone.pop_all()
    if store is None and not any(text for _, text in answers):
        node = world.rank // world.slots_per_node
        try:
            store = RowStore.open(answers[node * world.slots_per_node][0], layout, num_rows)
        except (OSError, ValueError) as error:
            failure = str(error)
    failures = [text for text in gather_json(failure, group=world.group) if text]
    # All have opened it, or given up.
    if leader and store is not None:
        store.unlink()
    if not failures:
        return store
    if world.is_main:
        _LOGGER.warning("no cache: %s; the frozen prefix is computed at every step", failures[0])
    if store is not None:
        store.close()
    return None


def _create(folder: Path, layout: RowLayout, num_rows: int) -> RowStore:
    """Create the file of a node's cache, without a name where such files can be made."""
    try:
        return RowStore.create_nameless(folder, layout, num_rows)
    except NamelessFilesError as error:
        _LOGGER.info("the cache's file has a name until all have opened it: %s", error)
        name = f"pipetransformer-{os.getpid()}-{time.time_ns()}"
        return RowStore.create(folder / name, layout, num_rows)

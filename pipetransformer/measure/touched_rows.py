"""Count the rows of large embeddings that a step touches, as replicas sum no others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from torch import nn

from pipetransformer.feed import Batch
from pipetransformer.measure.stretches import forward, run_spans
from pipetransformer.model import Task, large_embeddings
from pipetransformer.processes import World


def untouched_bytes(
    task: Task, world: World, batch: Batch, spans: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Return the bytes of a sublayer's gradient that stay zeros, by index, where it has such.

    That is of a global batch, whose samples are taken to have no row in common beyond those of
    one such batch: at least so many. Off the CPU, where all rows are summed, it is none.
    """
    sublayers = task.model.sublayers
    tables = {i: large_embeddings(one.module, world.device) for i, one in enumerate(sublayers)}
    holders = [index for index, own in tables.items() if own]
    if not holders or world.size == 1:
        return {}
    touched: dict[nn.Module, set[int]] = {}

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        touched.setdefault(module, set()).update(given[0].unique().tolist())

    with ExitStack() as hooks:
        for table in chain.from_iterable(tables.values()):
            hooks.callback(table.register_forward_pre_hook(note).remove)
        # As far as they reach: mostly the first sublayer alone.
        needed = [[i for i in span if i <= holders[-1]] for span in spans]
        run_spans(
            task,
            world.device,
            [span for span in needed if span],
            [batch],
            lambda subs, inputs: forward(subs, inputs[0]),
        )
    num_batches = task.config.global_batch_size / len(next(iter(batch.values())))
    return {
        index: sum(
            table.weight[0].nbytes * max(0.0, table.num_embeddings - num_batches * len(ids))
            for table in tables[index]
            if (ids := touched.get(table)) is not None
        )
        for index in holders
    }

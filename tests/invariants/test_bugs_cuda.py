"""Keep fixed, without a GPU, what was found wrong on one by reading; each with its story.

Tensors on a GPU are fake ones, with a device and no memory; or meta tensors, where the values of
others are needed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adam, AdamW

from autocache.prefix_cache import PrefixCache
from autocache.row_content import RowContent
from autocache.store import RowStore
from pipetransformer.model import put_state, take_state

META = torch.device("meta")


@pytest.mark.parametrize("stored", [False, True])
def test_what_goes_to_other_stages_beside_the_frozen_prefix_is_in_host_memory(
    stored: bool,
) -> None:
    # The cache gave targets and masks on the device, and they were sent from there, to a receive
    # in host memory: every pipeline of two stages with a frozen layer waited for ever.
    entries = {"x": torch.randn(6, 4), "mask": torch.ones(6, 4), "y": torch.arange(6)}
    content = RowContent(("mask", "y"))

    def load(ids: Tensor) -> dict[str, Tensor]:
        return {name: entry[ids] for name, entry in entries.items()}

    def run_layers(batch: dict[str, Tensor], first: int, last: int) -> Tensor:
        assert {entry.device for entry in batch.values()} == {META}
        return batch["x"] * 2

    store = None
    if stored:
        one = load(torch.tensor([0]))
        store = RowStore.in_memory(content.layout(one, one["x"]), 6)
        store.write(torch.arange(6), 1, full_rows(entries, store))
    cache = PrefixCache(
        run_layers, chunk_size=4, stamps=[1], store=store, device=META, content=content
    )
    rows = cache.fetch(torch.tensor([3, 1, 3, 5]), load, depth=1)
    assert rows["hidden"].device == META and rows["hidden"].shape == (4, 4)
    assert torch.equal(rows["y"], torch.tensor([3, 1, 3, 5]))
    assert rows["mask"].is_cpu and rows.keys() == {"hidden", "mask", "y"}


def full_rows(entries: dict[str, Tensor], store: RowStore) -> dict[str, Tensor]:
    """Make all rows of a store; digests that are never asked for."""
    rows = {"hidden": entries["x"], **entries, "digest": torch.zeros(6, dtype=torch.int64)}
    return {field.name: rows[field.name] for field in store.layout.fields}


@pytest.mark.parametrize(
    ("kind", "settings", "step_device"),
    [
        (AdamW, {"fused": True}, "cuda"),
        (Adam, {"fused": True, "amsgrad": True}, "cuda"),
        (AdamW, {"capturable": True}, "cuda"),
        (AdamW, {}, "cpu"),
        (SGD, {"momentum": 0.9}, ""),
    ],
)
def test_a_step_count_returns_to_where_the_optimizer_reads_it(
    kind: Any, settings: dict[str, bool], step_device: str
) -> None:
    # Optimizer state of frozen layers waits in host memory, and a checkpoint is read there. The
    # default optimizer, whose fused kernel reads the step count on the GPU, failed after a thaw.
    with FakeTensorMode():
        named = {"weight": nn.Parameter(torch.empty(4, 3, device="cuda"))}
        first = kind(named.values(), **settings)
        named["weight"].grad = torch.empty(4, 3, device="cuda")
        first.step()
        expected = {key: value.device for key, value in take_state(first, named).items()}
        assert not step_device or expected["weight/step"].type == step_device
        parked = {key: value.cpu() for key, value in take_state(first, named).items()}

        again = kind(named.values(), **settings)
        put_state(again, named, parked)
        for key, value in take_state(again, named).items():
            assert value.device == expected[key], key
        again.step()

"""Prove which order of samples a run has, on one node and on several, new and resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autodp.sampler import places_in_batches, shuffled, shuffled_in_place
from pipetransformer import Trainer
from pipetransformer.config import TrainConfig
from pipetransformer.feed import Timeline
from pipetransformer.feed.batch_forecast import (
    BatchForecast,
    keeps_places,
    share_of_rows_found,
)
from pipetransformer.processes.world import World
from tests.helpers.inspection import task_of
from tests.helpers.models import NUM_SAMPLES, tiny_data, tiny_model

SIZE = 8
USUAL = shuffled(NUM_SAMPLES, seed=0)
IN_PLACE = shuffled_in_place(places_in_batches(NUM_SAMPLES, SIZE), seed=0)


def in_order(epoch: int) -> Tensor:
    return torch.arange(NUM_SAMPLES)


@pytest.mark.parametrize(
    ("device", "nodes", "settings", "keeps", "found"),
    [
        ("cpu", 1, {}, False, 1.0),
        ("cpu", 2, {}, True, 1.0),
        ("cpu", 2, {"cache": False}, True, 1.0),
        ("cpu", 2, {"sample_order": in_order}, False, 0.5),
        ("cpu", 2, {"group_by_length": True}, False, 0.5),
        ("cpu", 4, {"scale_batch": True}, False, 0.25),
        ("cpu", 1, {"cache_device": "cuda"}, True, 1.0),
        ("cpu", 1, {"cache_device": "cuda", "sample_order": in_order}, False, 0.25),
        ("cuda", 1, {}, True, 1.0),
        ("cuda", 1, {"cache_device": "cpu"}, False, 1.0),
        ("cuda", 1, {"cache_keep": True, "cache_folder": "rows"}, False, 1.0),
        ("cuda", 2, {"group_by_length": True}, False, 0.5),
    ],
)
def test_samples_keep_their_places_where_rows_lie_apart(
    device: str, nodes: int, settings: dict[str, Any], keeps: bool, found: float
) -> None:
    config = TrainConfig(**settings)
    world = World(0, 4, 4 // nodes, torch.device(device), None, owned=False)
    assert (keeps_places(config, world), share_of_rows_found(config, world)) == (keeps, found)


@pytest.mark.parametrize("sample", [0, SIZE])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("resumed", [True, False])
def test_a_resumed_run_keeps_its_order_on_any_number_of_nodes(
    sample: int, begun: bool, resumed: bool
) -> None:
    settings = {"epochs": 3, "global_batch_size": SIZE, "progress": False}
    with Trainer(tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss(), **settings) as one:
        task = task_of(one)
    timeline = Timeline(task.config, NUM_SAMPLES, 1.0)
    timeline.position.epoch, timeline.position.sample = 1, sample
    before, after = (BatchForecast(task, tiny_data(), timeline) for _ in range(2))
    before.keep_places(keeps=begun)
    after.keep_places(keeps=resumed)
    after.load_state_dict(before.state_dict())
    whole = torch.cat([ids for epoch, ids in after.to_the_end(1) if epoch == 2])
    assert torch.equal(whole, (IN_PLACE if begun else USUAL)(2))
    # One of an earlier version does not say so, and had the usual order.
    earlier = {"seen": before.state_dict()["seen"]}
    if begun and sample:
        with pytest.raises(ValueError, match="8 samples of the epoch were trained on in another"):
            after.load_state_dict(earlier)
    else:
        after.load_state_dict(earlier)

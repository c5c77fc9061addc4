"""Of several processes each finds its samples' rows in its own GPU's memory, or in the file.

GPUs are stand-ins (see tests/helpers/stand_in_gpu.py), one in each of several real processes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autocache import TieredStore
from autodp import Topology
from autodp.sampler import shuffled
from pipetransformer import Trainer
from pipetransformer.feed import node_store
from pipetransformer.stage import BatchCut
from tests.helpers.inspection import evaluation_feed_of, store_of
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.models import NUM_SAMPLES
from tests.helpers.pool import Pool
from tests.helpers.scenario import Scenario, Shape, build_adamw, latest, nodes_of
from tests.helpers.stand_in_gpu import put_on_gpu, stand_in_gpu

SIZE = 8
"""Of a batch; the last of an epoch has two samples."""
REPLICAS = Scenario({0: Shape(1, 2)}, (2,), settings={"epochs": 2})
IN_DEVICES, IN_FILE = ("DeviceStore", NUM_SAMPLES), ("WriteBehind", NUM_SAMPLES)


@dataclass(frozen=True)
class Ran:
    """Say what a rank's run came to.

    Attributes:
        hits: of all ranks, by epoch.
        tiers: kinds of the stores where rows lay at the end, with how many there.
        evaluated: loss and accuracy, of the evaluation set's rows.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    hits: list[int]
    tiers: list[tuple[str, int]]
    evaluated: dict[str, float]


def train(
    scenario: Scenario, rooms: tuple[int, ...], deviations: int, settings: dict[str, Any]
) -> Ran:
    """Train on this world's GPUs.

    Args:
        rooms: rows that the ranks' GPUs have room for; () for all.
        deviations: by which a rank may have more rows than its share.
    """
    model, data, loss_fn = scenario.problem()
    with stand_in_gpu(), measuring(never), pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_store, "_DEVIATIONS", deviations)
        if rooms:
            patch.setattr(node_store, "device_bytes", lambda layout, num: num)
            patch.setattr(node_store, "room_on_device", lambda world: rooms[world.rank])
        put_on_gpu(model.model)
        # Larger chunks are filled with samples of steps to come, which hit in the first epoch.
        ours = {"global_batch_size": SIZE, "device": "cuda-shared", "prefix_chunk": 1}
        with (
            nodes_of(scenario.slots_per_node),
            Trainer(
                model, data, eval_dataset=data, loss_fn=loss_fn, freeze=scenario.policy(),
                optimizer=build_adamw, **{**scenario.options, **ours, **settings},
            ) as trainer,
        ):  # fmt: skip
            losses, hits = [], [0]
            while not trainer.is_over:
                losses.append(trainer.step().loss)
                if len(losses) % -(-NUM_SAMPLES // SIZE) == 0:
                    hits.append(trainer.report.cache_hits)
            trainer.evaluate()
            store, evaluated = store_of(trainer), trainer.evaluate()
            kinds = {type(one) for one in (store, evaluation_feed_of(trainer).keeper.store)}
            assert len(kinds) == 1 or "sample_order" in settings
            weights = trainer.state_dict()
    tiers = store.tiers if isinstance(store, TieredStore) else (store,)
    return Ran(
        losses,
        {name: getattr(one, "host", one).clone() for name, one in weights.items()},
        [after - before for before, after in pairwise(hits)],
        [(type(one).__name__, one.num_rows) for one in tiers if one is not None],
        evaluated,
    )


def run(
    pool: Pool,
    scenario: Scenario = REPLICAS,
    rooms: tuple[int, ...] = (),
    deviations: int = node_store._DEVIATIONS,
    **settings: Any,
) -> Ran:
    """Return what rank 0's run came to, where all ranks had stores of the same kinds."""
    first, *others = pool.run(train, scenario, rooms, deviations, settings)
    assert all(one.tiers == first.tiers for one in others)
    assert all(one.evaluated == first.evaluated for one in others)
    return first


def assert_same(ours: Ran, theirs: Ran) -> None:
    """Compare all numbers bit by bit."""
    assert (ours.losses, ours.evaluated) == (theirs.losses, theirs.evaluated)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, mine in ours.weights.items():
        assert torch.equal(mine, theirs.weights[name]), name


def hits_of(scenario: Scenario, num_ranks: int) -> list[int]:
    """Reckon the hits of each epoch, where a GPU has room for its rank's part of the rows alone.

    A rank finds what it has computed. Fewer replicas than at first begin anew.
    """
    options = {**scenario.options, "global_batch_size": SIZE}
    # On several nodes samples keep their places.
    order = replace(scenario, slots_per_node=1, settings=options).order(NUM_SAMPLES)
    known: dict[int, set[int]] = defaultdict(set)
    hits, made_for, step = [], 0, 0
    for epoch in range(options["epochs"]):
        hits.append(0)
        for ids in order(epoch).split(SIZE):
            shape = latest(scenario.shapes, step)
            topology = Topology(num_ranks, num_ranks, shape.length)
            if topology.replicas < made_for:
                known.clear()
            if not known:
                made_for = topology.replicas
            slices = BatchCut(topology.replicas, shape.micro_batches, None).slices(len(ids))
            for ranks, part in zip(topology.pipelines, ids.split(slices), strict=True):
                hits[-1] += len(known[ranks[0]] & {*part.tolist()})
                known[ranks[0]] |= {*part.tolist()}
            step += 1
    return hits


def in_another_order(epoch: int) -> Tensor:
    return shuffled(NUM_SAMPLES, seed=5)(epoch)


@pytest.mark.parametrize(
    ("rooms", "deviations", "tiers"),
    [
        # The GPU with least room says how many rows all have.
        ((15, 26), node_store._DEVIATIONS, [("DeviceStore", 15), ("WriteBehind", 11)]),
        # Each has room for half of the rows, which are those of its rank.
        slow((13, 26), 0, [IN_DEVICES]),
    ],
    ids=["and in the file", "alone"],
)
def test_replicas_find_all_rows_on_their_gpus_and_train_as_without(
    two_ranks: Pool, rooms: tuple[int, ...], deviations: int, tiers: list[tuple[str, int]]
) -> None:
    cached = run(two_ranks, rooms=rooms, deviations=deviations)
    assert (cached.tiers, cached.hits) == (tiers, [0, NUM_SAMPLES])
    assert_same(cached, run(two_ranks, cache=False))


@pytest.mark.parametrize(
    ("rooms", "settings"),
    [
        slow((26, 0), {}),
        slow((), {"cache_device": "cpu"}),
        slow((), {"sample_order": in_another_order}),
        slow((), {"cache_keep": True}),
    ],
    ids=["no room", "not asked for", "dealt anew", "kept"],
)
def test_else_the_rows_of_all_lie_in_the_file(
    two_ranks: Pool, tmp_path: Path, rooms: tuple[int, ...], settings: dict[str, Any]
) -> None:
    settings = {**settings, "cache_folder": tmp_path}
    in_file = run(two_ranks, rooms=rooms, **settings)
    assert (in_file.tiers, in_file.hits) == ([IN_FILE], [0, NUM_SAMPLES])
    assert_same(in_file, run(two_ranks, **{**settings, "cache": False}))


@pytest.mark.parametrize("device", [slow("auto"), slow("cpu")])
def test_rows_on_gpus_change_no_bit_against_files_of_two_nodes(
    two_ranks: Pool, device: str
) -> None:
    """There samples keep their places whatever `cache_device` is."""
    nodes = run(two_ranks, replace(REPLICAS, slots_per_node=1), cache_device=device)
    assert nodes.tiers == [IN_DEVICES if device == "auto" else IN_FILE]
    assert nodes.hits == [0, NUM_SAMPLES]
    assert_same(nodes, run(two_ranks))


@pytest.mark.parametrize(
    ("shapes", "num_anew"),
    [
        # Another rank begins to read half of the samples.
        slow({0: Shape(2, 3), 6: Shape(1, 2)}, NUM_SAMPLES // 2),
        # One rank reads all samples, and has no room for the other's.
        slow({0: Shape(1, 2), 6: Shape(2, 3)}, NUM_SAMPLES),
    ],
    ids=["more replicas", "fewer"],
)
def test_after_a_transition_a_rank_finds_what_it_has_computed(
    two_ranks: Pool, shapes: dict[int, Shape], num_anew: int
) -> None:
    scenario = Scenario(shapes, (2,), settings={"epochs": 4})
    wanted = hits_of(scenario, 2)
    assert wanted[0] == 0 and wanted[3] == NUM_SAMPLES
    assert 3 * NUM_SAMPLES - sum(wanted) == num_anew
    on_gpus = run(two_ranks, scenario, deviations=0)
    assert (on_gpus.tiers, on_gpus.hits) == ([IN_DEVICES], wanted)
    assert_same(on_gpus, run(two_ranks, scenario, cache=False))


SHAPES = {0: Shape(4, 4), 5: Shape(2, 3), 9: Shape(1, 2), 14: Shape(2, 2)}


@pytest.mark.parametrize("deviations", [slow(0), slow(node_store._DEVIATIONS)])
def test_no_bit_depends_on_rows_whatever_the_pipelines(four_ranks: Pool, deviations: int) -> None:
    scenario = Scenario(SHAPES, (1, 2), settings={"epochs": 6})
    on_gpus = run(four_ranks, scenario, deviations=deviations)
    assert on_gpus.tiers == [IN_DEVICES] and on_gpus.hits[-1] == NUM_SAMPLES
    assert_same(on_gpus, run(four_ranks, scenario, cache=False))

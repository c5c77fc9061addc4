"""Prove that a run beside a default group that has NCCL alone, as transformers' TrainingArguments
make it, uses a group of its own for everything, and leaves the other as it was."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers.foreign_group import without_cpus
from tests.helpers.models import tiny_data
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.scenario import (
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    make_trainer,
    merge,
    run_to_end,
)

SCENARIO = Scenario({0: Shape(2, 3), 5: Shape(1, 2), 9: Shape(2, 2)}, frozen=(0, 2, 2))


def train_beside_another_group(folder: str) -> Outcome:
    """Measure, train, save, evaluate and predict; then use the default group."""
    before = set(dist.distributed_c10d._world.pg_map)
    saving = {"checkpoint_every_epochs": 1, "folder": folder}
    with without_cpus(), make_trainer(SCENARIO, SCENARIO.policy(), **saving) as trainer:
        assert trainer.world.group is not dist.group.WORLD
        outcome = run_to_end(trainer, None)
        outcome.extra["loss"] = trainer.evaluate(tiny_data())["loss"]
        trainer.predict(tiny_data())
    left = set(dist.distributed_c10d._world.pg_map)
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    outcome.extra |= {"is_left_alone": left == before, "total": float(total)}
    return outcome


def test_beside_a_group_for_gpus_alone_a_run_has_a_group_of_its_own_for_everything(
    two_ranks: Pool, tmp_path: Path
) -> None:
    ranks = two_ranks.run(train_beside_another_group, str(tmp_path))
    assert_equal(merge(ranks), plain(SCENARIO))
    assert [entry["length"] for entry in ranks[0].extra["transitions"]] == [1, 2]
    assert len(list(tmp_path.glob("checkpoints/step-*/manifest.json"))) > 0
    for rank in ranks:
        assert rank.extra["is_left_alone"] and rank.extra["total"] == 2.0
        assert rank.extra["loss"] == ranks[0].extra["loss"]

"""Train over the links of GPUs, and wait over them in vain; skipped without GPUs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autodp.groups import build_groups
from autopipe.engine.links import Peer, Receiver, Sender, TensorSpec
from autopipe.engine.stream_watchdog import Milestone, Watchdog
from pipetransformer import launch
from pipetransformer.processes.world import connect
from tests.helpers.inspection import deployment_of
from tests.helpers.plain_scenario import plain
from tests.helpers.scenario import Outcome, Scenario, Shape, assert_equal, make_trainer, merge

pytestmark = pytest.mark.cuda
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

REPACKED = Scenario({0: Shape(2, 3), 4: Shape(1, 2), 9: Shape(2, 2, "gpipe")})
MOST_REPLICAS = [None, 1]
"""With one pipeline at most a slot is a spare while K = 1."""


def train_on(device: str, scenario: Scenario, folder: str) -> None:
    """Train the scenario on this rank's slot, and leave its outcome in the folder."""
    losses = []
    with make_trainer(scenario, scenario.policy(), device=device) as trainer:
        while not trainer.is_over:
            losses.append(trainer.step().loss)
        states = {
            name: tensor.cpu()
            for shard, tensors in deployment_of(trainer).held_shards().items()
            for name, tensor in tensors.items()
            if shard.endswith("/optimizer")
        }
        weights = {name: tensor.cpu() for name, tensor in trainer.state_dict().items()}
        found = (losses, weights, states, str(trainer.world.device), trainer.report.transitions)
        torch.save(found, Path(folder, f"rank{trainer.world.rank}.pt"))


def outcomes(device: str, max_replicas: int | None, folder: Path) -> tuple[Outcome, list[str]]:
    """Launch two ranks; return what they came to, and their devices."""
    scenario = dataclasses.replace(REPACKED, settings={"max_replicas": max_replicas})
    launch(train_on, (device, scenario, str(folder)), num_slots=2)
    found = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
    lengths = [entry["length"] for entry in found[0][4]]
    assert lengths == [1, 2], "K = 2, then 1 and as many replicas as may be, then 2"
    return merge([Outcome(*one[:3]) for one in found]), [one[3] for one in found]


@pytest.mark.parametrize("max_replicas", MOST_REPLICAS)
def test_two_slots_on_one_gpu_train_as_a_plain_loop_does(
    max_replicas: int | None, tmp_path: Path
) -> None:
    outcome, devices = outcomes("cuda-shared", max_replicas, tmp_path)
    num_gpus = torch.cuda.device_count()
    assert devices == [f"cuda:{slot % num_gpus}" for slot in range(2)]
    assert_equal(outcome, plain(REPACKED))


@two_gpus
@pytest.mark.parametrize("max_replicas", MOST_REPLICAS)
def test_two_gpus_train_over_nccl_as_a_plain_loop_does(
    max_replicas: int | None, tmp_path: Path
) -> None:
    outcome, devices = outcomes("cuda", max_replicas, tmp_path)
    assert devices == ["cuda:0", "cuda:1"]
    assert_equal(outcome, plain(REPACKED))


def test_a_mark_is_reached_when_the_stream_has_come_there() -> None:
    torch.cuda._sleep(500_000_000)
    mark = Milestone()
    assert not mark.is_reached()
    mark.wait()
    assert mark.is_reached()


def wait_in_vain(folder: str) -> None:
    """Let rank 1 wait over NCCL for a rank 0 that sends nothing until rank 1 has given up."""
    world = connect("cuda", timeout_s=60.0)
    groups = build_groups(world.topology(2), world.rank, on_cuda=True, timeout_s=60.0)
    assert groups.forward is not None and world.group is not None
    if world.rank == 1:
        silent = Peer(0, groups.forward, 1, "activations", 1.0, Watchdog(groups.abort))
        receiver, sender = Receiver(silent, world.device), Sender(silent)
        receiver.begin([0], [2])
        receiver.spec = TensorSpec((3,), "float32")
        received = receiver.receive(0)
        torch.cuda.Event().record()  # The host goes on: this line is reached at once.
        try:
            sender.flush()
        except RuntimeError as error:
            Path(folder, "error").write_text(f"{tuple(received.shape)} {error}")
    dist.barrier(group=dist.new_group(backend="gloo"))


@two_gpus
def test_a_rank_that_waits_in_vain_over_nccl_says_for_whom(tmp_path: Path) -> None:
    launch(wait_in_vain, (str(tmp_path),), num_slots=2)
    assert (
        (tmp_path / "error")
        .read_text()
        .startswith(
            "(2, 3) rank 1 waited for the activations of rank 0 (limit 1 s): the links have been"
        )
    )

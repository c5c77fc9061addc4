"""Prove that a transition moves what must move, keeps every bit, and fits into memory."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import pipetransformer.elastic.deployment
from autodp.messages import gather_json
from autodp.redistribute import move_shards
from autopipe.plan.request import PipelinePlan
from pipetransformer import Trainer, adamw
from pipetransformer.elastic.decision import Decision
from pipetransformer.elastic.deployment import Deployment
from tests.helpers.inspection import deployment_of, layered_of, model_of, stage_of
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.measured import measuring, never
from tests.helpers.models import NUM_CLASSES, NUM_FEATURES, Block, tiny_data, tiny_trainer
from tests.helpers.pool import Pool
from tests.helpers.scenario import Forced, Shape

WIDTH = 64
ROUND_BYTES = 80_000
"""A round of the tests: two weights of a block, of 32 kB each, and what is between them."""
NUM_SUBLAYERS = 8


@contextmanager
def start(length: int, **settings: Any) -> Iterator[Trainer]:
    """Build a trainer of an embedding, six blocks and a head, float32, AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(NUM_FEATURES, WIDTH),
        *[Block(WIDTH, 0.0) for _ in range(NUM_SUBLAYERS - 2)],
        nn.Linear(WIDTH, NUM_CLASSES),
    )
    trainer = tiny_trainer(
        model,
        tiny_data(dtype=torch.float32),
        optimizer=adamw(),
        plan=Forced({0: Shape(length, 2)}),
        epochs=3,
        global_batch_size=8,
        cache=False,
        evaluate_every_epochs=0,
        **settings,
    )
    with measuring(never), trainer:
        yield trainer


def decision(
    boundaries: tuple[int, ...], *, micro_batches: int = 2, schedule: str = "1f1b"
) -> Decision:
    """Ask for a pipeline; a layer is a sublayer here, so boundaries[0] of them are frozen."""
    length = len(boundaries) - 1
    plan = PipelinePlan(length, boundaries, micro_batches, schedule, 1.0, (0,) * length)
    return Decision(2, boundaries[0], plan, False, "a test")


def held(deployment: Deployment) -> dict[str, Tensor]:
    """Return every tensor that this rank holds, by shard and name."""
    return {
        f"{shard}/{name}": tensor
        for shard, tensors in deployment.held_shards().items()
        for name, tensor in tensors.items()
    }


def digests(deployment: Deployment) -> list[dict[str, str]]:
    """Return every rank's hashes of what it holds."""
    own = {name: digest(tensor) for name, tensor in held(deployment).items()}
    return gather_json(own, group=deployment._world.group)


def digest(tensor: Tensor) -> str:
    return sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def change_again_and_again(sequence: list[tuple[int, ...]]) -> list[list[str]]:
    """Carry out decisions; return for each what differs anywhere from what its owner held."""
    wrong = []
    with start(2) as trainer:
        trainer.step()
        trainer.step()
        deployment = deployment_of(trainer)
        before = {k: v for one in reversed(digests(deployment)) for k, v in one.items()}
        for boundaries in sequence:
            deployment.change(decision(boundaries))
            after = digests(deployment)
            expected = deployment._ownership.shards()  # type: ignore[union-attr]
            missing = [
                f"rank {rank} lacks {shard}"
                for shard, ranks in expected.items()
                for rank in range(trainer.world.size)
                if any(key.startswith(shard) for key in after[rank]) != (rank in ranks)
            ]
            wrong.append(
                missing
                + [
                    f"rank {rank}: {name}"
                    for rank, one in enumerate(after)
                    for name, digest in one.items()
                    if before[name] != digest
                ]
            )
    return wrong


SHRINK_GROW_FREEZE_THAW = [
    (0, 8), (0, 3, 8), (0, 5, 8), (2, 8), (4, 6, 8), (6, 8), (1, 3, 8), (0, 8), (3, 4, 8),
    (0, 6, 8),
]  # fmt: skip


def test_every_weight_and_moment_is_its_owners_bit_for_bit_after_any_change(
    two_ranks: Pool, four_ranks: Pool
) -> None:
    longer = [*SHRINK_GROW_FREEZE_THAW, (0, 2, 4, 6, 8), (3, 5, 8), (1, 3, 5, 7, 8), (4, 8)]
    for pool, sequence in ((two_ranks, SHRINK_GROW_FREEZE_THAW), (four_ranks, longer)):
        for wrong in pool.run(change_again_and_again, sequence):
            assert wrong == [[] for _ in sequence]


def gather_and_go_on() -> list[str]:
    """Gather the weights between two steps, then move them; return what went wrong here."""
    wrong = []
    with start(2) as trainer:
        trainer.step()
        deployment = deployment_of(trainer)
        before = {name: t.data_ptr() for name, t in held(deployment).items()}
        owners = {k: v for one in digests(deployment) for k, v in one.items()}
        deployment.gather_weights(torch.device("cpu"))
        if {name: t.data_ptr() for name, t in held(deployment).items()} != before:
            wrong.append("shards of this rank were touched")
        if trainer.world.is_main:
            model = layered_of(trainer)
            gathered = {
                f"{sub.name}/weights/{name}": digest(tensor)
                for index, sub in enumerate(model.sublayers)
                for name, tensor in model.tensors(index).items()
            }
            wrong += [name for name, value in gathered.items() if owners[name] != value]
        trainer.step()  # What rank 0 gathered is out of date now.
        owners = {k: v for one in digests(deployment) for k, v in one.items()}
        deployment.change(decision((0, 8)))
        own = digests(deployment)[trainer.world.rank]
        wrong += [name for name in owners if own.get(name) != owners[name]]
    return wrong


def test_gathered_weights_are_all_and_in_nobody_s_way(two_ranks: Pool) -> None:
    assert two_ranks.run(gather_and_go_on) == [[], []]


def gather_into(device: str) -> list[str]:
    """Gather the weights onto a device; return where this rank's model is then."""
    with start(2) as trainer:
        trainer.step()
        deployment_of(trainer).gather_weights(torch.device(device))
        model = layered_of(trainer)
        return [
            next(iter(model.tensors(i).values())).device.type for i in range(len(model.sublayers))
        ]


def test_rank_0_takes_gathered_weights_where_it_is_told_and_leaves_its_own(
    two_ranks: Pool,
) -> None:
    # "meta" stands for any device that is not the one of this rank.
    assert two_ranks.run(gather_into, "cpu") == [["cpu"] * 8, ["meta"] * 4 + ["cpu"] * 4]
    assert two_ranks.run(gather_into, "meta") == [["cpu"] * 4 + ["meta"] * 4] + [
        ["meta"] * 4 + ["cpu"] * 4
    ]


def test_gathered_weights_go_to_host_memory_until_the_run_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: list[torch.device] = []
    cpu, roomy = torch.device("cpu"), torch.device("meta")
    monkeypatch.setattr(Deployment, "gather_weights", lambda self, device: devices.append(device))
    monkeypatch.setattr(Deployment, "roomy_device", lambda self: roomy)
    with start(1) as trainer:
        trainer.state_dict()
        trainer.fit()
        trainer.state_dict()
    assert devices == [cpu, roomy, roomy]


@pytest.mark.parametrize("room", [-1, 0])
def test_weights_that_do_not_fit_on_rank_0_s_device_are_gathered_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    with start(1) as trainer:
        deployment, cuda = deployment_of(trainer), torch.device("cuda", 0)
        needed = sum(p.nbytes for p in model_of(trainer).parameters())
        free = needed + pipetransformer.elastic.deployment.ROUND_BYTES + room
        monkeypatch.setattr(pipetransformer.elastic.deployment, "free_bytes", lambda device: free)
        monkeypatch.setattr(deployment, "_world", dataclasses.replace(trainer.world, device=cuda))
        assert deployment.roomy_device() == (cuda if room == 0 else torch.device("cpu"))
        monkeypatch.undo()
    assert ("model.cpu() brings the others there" in caplog.text) == (room < 0)


def change_counted(trainer: Trainer, to: Decision) -> dict[str, int]:
    """Carry out a decision in rounds of the tests; count this rank's bytes while shards move."""
    deployment = deployment_of(trainer)
    found = {"first": sum(t.nbytes for t in held(deployment).values())}

    def counted(*arguments: Any, **keywords: Any) -> int:
        gc.collect()
        live = LiveBytes([one for one in gc.get_objects() if isinstance(one, Tensor)])
        found["entry"] = live.now()
        with live:
            moved = move_shards(*arguments, **keywords)
        found["peak"] = max(found["entry"], live.peak)
        return moved

    with (
        patch.object(pipetransformer.elastic.deployment, "move_shards", counted),
        patch("autodp.redistribute.ROUND_BYTES", ROUND_BYTES),
    ):
        found["moved"] = deployment.change(to)
    found["last"] = sum(t.nbytes for t in held(deployment).values())
    return found


def count_change(length: int, boundaries: tuple[int, ...]) -> dict[str, int]:
    """Train a step, and count a change."""
    with start(length) as trainer:
        trainer.step()
        return change_counted(trainer, decision(boundaries))


def test_a_rank_that_gives_all_and_gets_all_holds_never_both(four_ranks: Pool) -> None:
    # Stage 1 of 4 gives all of its sublayers to ranks 0 and 2, and becomes stage 1 of 2.
    counts = four_ranks.run(count_change, 4, (0, 4, 8))
    for found in counts:
        allowed = max(found["first"], found["last"]) - found["first"] + ROUND_BYTES
        # Beside a round: the exchange's headers and copies of its small tensors.
        assert found["peak"] - found["entry"] <= allowed + 10_000
    assert counts[1]["moved"] == counts[1]["last"] > 4 * ROUND_BYTES


def watch_entry(trainer: Trainer, act: Callable[[], object]) -> dict[str, Any]:
    """Do what leads to a change, and note what this rank has when the first shard is to move."""
    found: dict[str, Any] = {}
    model = model_of(trainer)

    def watched(*arguments: Any, **keywords: Any) -> int:
        tensors = [*model.parameters(), *model.buffers()]
        found["weights"] = sum(t.nbytes for t in tensors if not t.is_meta)
        found["gradients"] = sum(p.grad is not None for p in model.parameters())
        gc.collect()
        found["optimizers"] = num_optimizers()
        found["received"] = move_shards(*arguments, **keywords)
        return int(found["received"])

    with patch.object(pipetransformer.elastic.deployment, "move_shards", watched):
        act()
    return found


def num_optimizers() -> int:
    """Count those that live."""
    return sum(isinstance(one, torch.optim.Optimizer) for one in gc.get_objects())


def enter_first_change(other: str | None) -> dict[str, Any]:
    """Begin; rank 1 has one value of a tensor of its own, or of all."""
    with start(2) as trainer:
        model = model_of(trainer)
        first = dict(model.named_parameters())  # Held, as else their places are taken again.
        if trainer.world.rank == 1 and other is not None:
            with torch.no_grad():
                for name, one in model.named_parameters():
                    if name.startswith(other):
                        one.view(-1)[-1] += 1
        found = watch_entry(trainer, trainer.begin)
        own = [held(deployment_of(trainer)), dict(model.named_parameters())]
        found["stays"] = {n for n, one in own[1].items() if one is first[n]}
        found["held"] = {n for n, one in own[1].items() if not one.is_meta}
        found["state"] = {name: digest(one) for name, one in own[0].items()}
        return found


def test_other_ranks_let_go_of_their_initial_weights_before_rank_0_s_come(two_ranks: Pool) -> None:
    mine, others = two_ranks.run(enter_first_change, "")
    assert mine["weights"] > 0
    assert others["weights"] == 0
    assert others["received"] > 0 and not others["stays"]


def test_ranks_that_loaded_the_same_weights_keep_their_own(two_ranks: Pool) -> None:
    # Those may be pages of a mapped file, which processes share.
    mine, others = two_ranks.run(enter_first_change, None)
    assert mine["received"] == others["received"] == 0
    assert others["stays"] == others["held"] and len(others["held"]) > 4
    # The same as when all is sent.
    _, sent = two_ranks.run(enter_first_change, "")
    assert others["state"] == sent["state"]


def test_the_one_layer_that_differs_comes_from_rank_0(two_ranks: Pool) -> None:
    _, expected = two_ranks.run(enter_first_change, None)
    _, others = two_ranks.run(enter_first_change, "7.")
    assert others["held"] - others["stays"] == {"7.weight", "7.bias"}
    assert others["received"] == (WIDTH + 1) * NUM_CLASSES * 4
    assert others["state"] == expected["state"]


def enter_second_change() -> dict[str, Any]:
    """Hold on to the old stage while it is left, as a caller may."""
    gc.collect()
    others = num_optimizers()  # Of tests before this one, in the same process.
    with start(2) as trainer:
        trainer.step()
        stage = stage_of(trainer)
        assert stage.trained.optimizer is not None
        found = watch_entry(trainer, lambda: deployment_of(trainer).change(decision((0, 8))))
        found["optimizers"] -= others
        found["kept"] = (stage.trained.optimizer, len(stage.trained.parameters))
        return found


def test_the_old_stage_s_memory_is_free_before_the_first_shard_comes(two_ranks: Pool) -> None:
    for found in two_ranks.run(enter_second_change):
        assert found["gradients"] == found["optimizers"] == 0
        assert found["kept"] == (None, 0)


def change_locally() -> list[str]:
    """Change what needs no other rank; return what was touched nevertheless."""
    touched = []
    refused = AssertionError("no rank needs another for this")
    with start(2) as trainer:
        trainer.step()
        deployment = deployment_of(trainer)
        deployment.change(decision((0, 4, 8)))
        groups = deployment.active_stage._wiring.groups
        before = {name: t.data_ptr() for name, t in held(deployment).items()}
        for to in (
            decision((0, 4, 8), micro_batches=4),
            decision((0, 4, 8), schedule="gpipe"),
            decision((2, 4, 8)),  # A freeze of layers on stage 0.
            decision((0, 4, 8)),  # And their thaw.
        ):
            with (
                patch("autodp.redistribute.gather_json", side_effect=refused),
                patch("autodp.redistribute.dist.isend", side_effect=refused),
                patch("torch.distributed.new_group", side_effect=refused),
            ):
                if deployment.change(to):
                    touched.append(f"{to.plan}: bytes moved")
            after = {name: t.data_ptr() for name, t in held(deployment).items()}
            if after != before:
                touched.append(f"{to.plan}: tensors replaced")
            if deployment.active_stage._wiring.groups != groups:
                touched.append(f"{to.plan}: groups replaced")
    return touched


def test_a_change_that_needs_no_other_rank_touches_nothing(two_ranks: Pool) -> None:
    assert two_ranks.run(change_locally) == [[], []]


def freeze_and_look() -> list[tuple[list[str], list[bool]]]:
    """Freeze layers of stage 1 with a shorter pipeline, then thaw them with a longer one."""
    found = []
    with start(2) as trainer:
        trainer.step()
        deployment = deployment_of(trainer)
        for boundaries in ((6, 8), (0, 4, 8)):
            deployment.change(decision(boundaries))
            parked = deployment._held.states
            found.append((sorted(parked), [t.is_cpu for s in parked.values() for t in s.values()]))
    return found


def test_frozen_layers_moments_wait_in_host_memory_at_their_owner(two_ranks: Pool) -> None:
    owner, other = two_ranks.run(freeze_and_look)
    (names, on_cpu), thawed = owner
    assert names == [str(i) for i in range(6)]
    assert all(on_cpu) and len(on_cpu) == 3 * (2 + 5 * 6)
    assert thawed == ([], [])
    assert other == [([], []), ([], [])]

"""Take two processes from a pipeline of two stages to two replicas of one, timed and checked."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from statistics import median

import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from autodp import Shard, gather_json
from autopipe.plan import PipelinePlan
from pipetransformer import PlanSituation, Trainer, adamw
from pipetransformer.elastic import Decision, Deployment, fastest_by_length

_NUM_COPIES = 3


class StateChangedError(AssertionError):
    """Say which tensor a transition changed or lost."""


@dataclass(frozen=True)
class TransitionSetting:
    """Say what is trained.

    Args:
        model: name of a timm model.
        image_size: pixels a side.
        batch_size: the global batch.
        num_steps: training steps before the transition, of which the first does not count.
    """

    model: str = "vit_base_patch16_224"
    image_size: int = 224
    batch_size: int = 16
    num_steps: int = 5

    def __post_init__(self) -> None:
        if self.num_steps < 2:
            raise ValueError(
                f"num_steps is {self.num_steps}; give at least 2, as the first does not count"
            )

    def build(self) -> nn.Module:
        """Build the model with random weights."""
        torch.manual_seed(0)
        model = timm.create_model(self.model, img_size=self.image_size)
        assert isinstance(model, nn.Module)
        return model


@dataclass(frozen=True)
class TransitionTimes:
    """Hold what one launch found.

    Args:
        parameters: of the model.
        step_s: median training step before the transition.
        plan_s: planning it.
        change_s: carrying it out, until the last rank is done.
        copy_s: copying, on all ranks at once, what each receives into fresh memory.
        first_step_s, second_step_s: the steps after it; the first also touches new memory.
        moved_bytes: received by all ranks together.
    """

    parameters: int
    step_s: float
    plan_s: float
    change_s: float
    copy_s: float
    first_step_s: float
    second_step_s: float
    moved_bytes: int

    @property
    def steps(self) -> float:
        """Return the transition in training steps."""
        return (self.plan_s + self.change_s) / self.step_s

    @property
    def over_copy(self) -> float:
        """Return the transition over the copy."""
        return (self.plan_s + self.change_s) / self.copy_s


class RandomImages(Dataset[tuple[Tensor, Tensor]]):
    """Give the same few random images again and again."""

    def __init__(self, workload: TransitionSetting) -> None:
        size = workload.image_size
        self._images = torch.randn(workload.batch_size, 3, size, size)
        self._length = workload.batch_size * (workload.num_steps + 2)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index % len(self._images)], torch.tensor(index % 10)


class Shrinking:
    """Plan two stages first and one afterwards, at the cost of looking at all lengths."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, situation: PlanSituation) -> PipelinePlan:
        start = time.perf_counter()
        plans = fastest_by_length(situation)
        self.seconds = time.perf_counter() - start
        return plans[2 if situation.current is None else 1]


@dataclass(frozen=True)
class Change:
    """Report how a decision was carried out: seconds until the last rank was done, bytes here."""

    seconds: float
    num_bytes: int


def watch_changes(deployment: Deployment) -> list[Change]:
    """Time and check every change of a deployment from now on; return the list they go to.

    A check reads all of a rank's memory before the change and after it, outside of its time.
    """
    changes: list[Change] = []
    change = deployment.change

    def watched(decision: Decision) -> int:
        owned = digests(deployment.owned_shards())
        ranks = gather_json(owned, group=dist.group.WORLD)
        expected = {name: digest for one in ranks for name, digest in one.items()}
        dist.barrier()
        start = time.perf_counter()
        num_bytes = change(decision)
        dist.barrier()
        changes.append(Change(time.perf_counter() - start, num_bytes))
        check(digests(deployment.held_shards()), expected)
        return num_bytes

    deployment.change = watched  # type: ignore[method-assign]
    return changes


def digests(shards: Mapping[str, Shard]) -> dict[str, str]:
    """Return a hash of every tensor's bytes, by shard and name."""
    return {
        f"{shard}/{name}": sha256(_bytes_of(tensor).numpy().data).hexdigest()
        for shard, tensors in shards.items()
        for name, tensor in tensors.items()
    }


def check(held: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Compare all ranks' hashes, of all weights and moments, with what the owners' were.

    Raises:
        StateChangedError: on every rank: a tensor of one is another, or missing.
    """
    wrong = [name for name in expected if held.get(name) != expected[name]]
    for rank, names in enumerate(gather_json(wrong, group=dist.group.WORLD)):
        if names:
            raise StateChangedError(
                f"{len(names)} of {len(expected)} tensors of rank {rank} are not what their "
                f"owners held before the transition, among them {names[:3]}"
            )


def copy_seconds(deployment: Deployment) -> float:
    """Copy what the other rank holds, by its size, into fresh memory; all ranks at once."""
    tensors = [t for shard in deployment.held_shards().values() for t in shard.values()]
    own = [_bytes_of(tensor) for tensor in tensors]
    sizes = gather_json(sum(map(len, own)), group=dist.group.WORLD)
    num_bytes = sum(sizes) - sizes[dist.get_rank()]
    seconds = []
    for _ in range(_NUM_COPIES):
        # Memory that malloc keeps would be warm: a process that has trained has plenty.
        fresh = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        target = torch.frombuffer(fresh, dtype=torch.uint8)
        dist.barrier()
        start = time.perf_counter()
        offset = 0
        for source in itertools.cycle(own):
            part = target[offset : offset + len(source)]
            part.copy_(source[: len(part)])
            offset += len(part)
            if offset == num_bytes:
                break
        seconds.append(time.perf_counter() - start)
        del target, part, fresh
    return median(seconds)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def measure_on_this_rank(workload: TransitionSetting) -> TransitionTimes:
    """Train and shrink together with the other rank; both return the same.

    Raises:
        StateChangedError: a weight or moment is not what its owner held before.
    """
    plan = Shrinking()
    with Trainer(
        workload.build(),
        RandomImages(workload),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=adamw(1e-4),
        freeze=lambda context: None,
        freeze_interval_steps=workload.num_steps,
        plan=plan,
        global_batch_size=workload.batch_size,
        epochs=1,
        cache=False,
        device="cpu",
        progress=False,
        evaluate_every_epochs=0,
    ) as trainer:
        seconds = [trainer.step().seconds for _ in range(workload.num_steps)]
        deployment = trainer._deployment
        copy_s = copy_seconds(deployment)
        changes = watch_changes(deployment)
        after = [trainer.step().seconds for _ in range(2)]
        (change,) = changes
        parameters = sum(p.numel() for p in trainer._task.model.model.parameters())
        own = {
            "step_s": median(seconds[1:]),
            "plan_s": plan.seconds,
            "change_s": change.seconds,
            "copy_s": copy_s,
            "first_step_s": after[0],
            "second_step_s": after[1],
        }
        ranks = gather_json(own, group=dist.group.WORLD)
        moved_bytes = sum(gather_json(change.num_bytes, group=dist.group.WORLD))
    slowest = {name: max(rank[name] for rank in ranks) for name in own}
    return TransitionTimes(parameters=parameters, moved_bytes=moved_bytes, **slowest)

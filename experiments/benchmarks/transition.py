"""Measure what the first transition of a run costs: K = 2 -> 1 on two processes of one thread.

Every launch is two fresh processes that train a few steps, copy as many bytes as each will receive
into fresh memory (the control), and then change from one pipeline of two stages to two replicas of
one. The transition is planning and all from leaving the old stage to the last rank's new one;
asking the policy and publishing the answer, about a millisecond, is left out. Every weight and
moment is compared with what its owner held before. Run it as `python -m
experiments.benchmarks.transition`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from autodp import Shard, gather_json
from autopipe import PipelinePlan
from pipetransformer import PlanSituation, Trainer, adamw
from pipetransformer.deployment import Decision, Deployment
from pipetransformer.launch import launch
from pipetransformer.planning import fastest_by_length

STEPS_LIMIT = 1.0
COPY_LIMIT = 3.0
_NUM_COPIES = 3


class StateChangedError(AssertionError):
    """Say which tensor a transition changed or lost."""


@dataclass(frozen=True)
class Workload:
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

    def build(self) -> nn.Module:
        """Build the model with random weights."""
        torch.manual_seed(0)
        model = timm.create_model(self.model, img_size=self.image_size)
        assert isinstance(model, nn.Module)
        return model


@dataclass(frozen=True)
class Measured:
    """Hold what one launch found.

    Args:
        parameters: of the model.
        step_s: median training step before the transition.
        plan_s: planning it.
        change_s: carrying it out, until the last rank is done.
        copy_s: copying, on all ranks at once, what each receives into fresh memory.
        moved_bytes: received by all ranks together.
    """

    parameters: int
    step_s: float
    plan_s: float
    change_s: float
    copy_s: float
    moved_bytes: int

    @property
    def steps(self) -> float:
        """Return the transition in training steps."""
        return (self.plan_s + self.change_s) / self.step_s

    @property
    def over_copy(self) -> float:
        """Return the transition over the copy."""
        return (self.plan_s + self.change_s) / self.copy_s


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Give the same few random images again and again."""

    def __init__(self, workload: Workload) -> None:
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
        expected = {
            name: d for one in gather_json(owned, group=world()) for name, d in one.items()
        }
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
    """Compare this rank's hashes, of all weights and moments, with what the owners' were.

    Raises:
        StateChangedError: a tensor is another, or missing.
    """
    wrong = [name for name in expected if held.get(name) != expected[name]]
    if wrong:
        raise StateChangedError(
            f"rank {dist.get_rank()}: {len(wrong)} of {len(expected)} tensors are not what their "
            f"owners held before the transition, among them {wrong[:3]}"
        )


def copy_seconds(deployment: Deployment) -> float:
    """Copy what the other rank holds, by its size, into fresh memory; all ranks at once."""
    tensors = [t for shard in deployment.held_shards().values() for t in shard.values()]
    own = [_bytes_of(tensor) for tensor in tensors]
    sizes = gather_json(sum(map(len, own)), group=world())
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


def world() -> dist.ProcessGroup | None:
    """Return the group of both ranks."""
    return dist.group.WORLD


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def measure_on_this_rank(workload: Workload) -> Measured:
    """Train and shrink together with the other rank; both return the same.

    Raises:
        StateChangedError: a weight or moment is not what its owner held before.
    """
    plan = Shrinking()
    with Trainer(
        workload.build(),
        Images(workload),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=adamw(1e-4),
        freeze=lambda context: None,
        freeze_interval_steps=workload.num_steps,
        plan=plan,
        batch_size=workload.batch_size,
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
        trainer.step()
        (change,) = changes
        parameters = sum(p.numel() for p in trainer._task.model.model.parameters())
        own = [median(seconds[1:]), plan.seconds, change.seconds, copy_s]
        slowest = map(max, zip(*gather_json(own, group=world()), strict=True))
        moved_bytes = sum(gather_json(change.num_bytes, group=world()))
    step_s, plan_s, change_s, slowest_copy_s = slowest
    return Measured(parameters, step_s, plan_s, change_s, slowest_copy_s, moved_bytes)


def measure(workload: Workload) -> Measured:
    """Measure on two fresh processes of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        launch(_write_measured, [workload, path], num_slots=2)
        return Measured(**json.loads(path.read_text()))


def _write_measured(workload: Workload, path: Path) -> None:
    measured = measure_on_this_rank(workload)
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps(asdict(measured)))


def verdict(workload: Workload, runs: Sequence[Measured]) -> dict[str, Any]:
    """Return what the last line says: medians over the launches, with the least and the most."""
    steps, over_copy = [run.steps for run in runs], [run.over_copy for run in runs]
    return {
        "transition_steps": median(steps),
        "transition_steps_range": [min(steps), max(steps)],
        "transition_over_copy": median(over_copy),
        "transition_over_copy_range": [min(over_copy), max(over_copy)],
        "moved_bytes": runs[0].moved_bytes,
        "parameters": runs[0].parameters,
        "launches": len(runs),
        "limits": {"transition_steps": STEPS_LIMIT, "transition_over_copy": COPY_LIMIT},
        "workload": asdict(workload),
        "torch": torch.__version__,
    }


def parse(arguments: Sequence[str]) -> tuple[Workload, int]:
    """Read the command line; the defaults are the figure that is claimed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.transition")
    default = Workload()
    parser.add_argument("--model", default=default.model, help="a timm ViT")
    parser.add_argument("--image-size", type=int, default=default.image_size)
    parser.add_argument("--batch-size", type=int, default=default.batch_size)
    parser.add_argument("--steps", type=int, default=default.num_steps)
    parser.add_argument("--launches", type=int, default=3)
    given = parser.parse_args(arguments)
    workload = Workload(given.model, given.image_size, given.batch_size, given.steps)
    return workload, given.launches


def main(arguments: Sequence[str]) -> int:
    """Measure and print; fail only if no launch was within the limits."""
    workload, num_launches = parse(arguments)
    print(
        f"{workload.model}, {workload.image_size} px, global batch {workload.batch_size}, AdamW, "
        f"2 processes of one thread, K = 2 -> 1, torch {torch.__version__}"
    )
    print("launch   step (s)   planning (s)   change (s)   copy (s)   steps   over copy")
    runs = []
    for number in range(num_launches):
        run = measure(workload)
        runs.append(run)
        print(
            f"{number:6d} {run.step_s:10.3f} {run.plan_s:14.3f} {run.change_s:12.3f} "
            f"{run.copy_s:10.3f} {run.steps:7.3f} {run.over_copy:11.2f}",
            flush=True,
        )
    line = verdict(workload, runs)
    print(
        f"{line['moved_bytes'] / 1e6:.0f} MB moved, every weight and moment of "
        f"{line['parameters'] / 1e6:.1f} M parameters is bit for bit its owner's"
    )
    print(json.dumps(line))
    best = [min(run.steps for run in runs), min(run.over_copy for run in runs)]
    return int(best[0] > STEPS_LIMIT or best[1] > COPY_LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

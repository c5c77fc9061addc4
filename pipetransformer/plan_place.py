"""Get the costs of a model at a place: a cluster that is described, or the machine at hand."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from autopipe import Profile, ProfiledSublayer
from autopipe.cluster import load_cluster
from autopipe.modelled import modelled_profile
from pipetransformer.adapters import LayeredModel
from pipetransformer.config import TrainConfig
from pipetransformer.launch import launch
from pipetransformer.measure import measure
from pipetransformer.named_model import ModelChoice, NamedModel, build_named
from pipetransformer.optimizer_state import adamw
from pipetransformer.task import Task
from pipetransformer.world import connect

_SETUP_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Place:
    """Hold what planning for a place needs.

    Args:
        name: for people.
        profile: the model's costs there.
        num_slots, slots_per_node: device slots that would train.
        memory_bytes: of a slot; None where it is not known.
        cache_bytes_per_s: at which cached activations are read; None where it is not known.
    """

    name: str
    profile: Profile
    num_slots: int
    slots_per_node: int
    memory_bytes: int | None
    cache_bytes_per_s: float | None


def described_place(choice: ModelChoice, cluster_file: str) -> Place:
    """Model the costs for a cluster's file.

    Raises:
        ValueError: file or model cannot be read or counted; see `load_cluster`, `build_named` and
            `modelled_profile`.
    """
    cluster = load_cluster(cluster_file)
    named = build_named(choice, device="meta")
    return Place(
        cluster.name,
        modelled_profile(profiled(named.model), named.sample, cluster),
        cluster.num_slots,
        cluster.slots_per_node,
        cluster.memory_bytes,
        cluster.cache_bytes_per_s,
    )


def profiled(model: LayeredModel) -> list[ProfiledSublayer]:
    """Present a model's sublayers to be measured or counted, without its loss."""
    return [
        ProfiledSublayer(sub.name, sub.layer, sub.module, _Caller(model, index))
        for index, sub in enumerate(model.sublayers)
    ]


@dataclass(frozen=True)
class _Caller:
    """Run a sublayer as `ProfiledSublayer` asks."""

    model: LayeredModel
    index: int

    def __call__(self, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        return self.model.call(self.index, batch if hidden is None else hidden, sides=batch)


def place_at_hand(choice: ModelChoice, *, num_slots: int, global_batch: int) -> Place:
    """Measure the costs on this machine, in one process per slot.

    Args:
        choice: the model.
        num_slots: processes to start; see `default_slots`.
        global_batch: samples of a step; micro-batches of it are measured.
    Raises:
        ValueError: the model cannot be built, or there is no slot.
        WorkerFailedError: measuring failed.
    """
    if not choice.is_own:  # A mistake is better found here than by every process.
        build_named(choice, device="meta")
    with tempfile.TemporaryDirectory(prefix="pipetransformer-plan-") as folder:
        answer = Path(folder) / "answer.json"
        launch(_measure_here, (choice, global_batch, str(answer)), num_slots=num_slots)
        values = json.loads(answer.read_text())
    # The sample is made up, so that reading it tells nothing of a dataset.
    profile = replace(Profile.from_json(values["profile"]), read_s=0.0, fetch_s=0.0)
    name = f"this machine, a {values['device'].upper()} for each slot"
    return Place(
        name,
        profile,
        num_slots,
        num_slots,
        values["memory_bytes"],
        values["copy_bytes_per_s"],
    )


def default_slots() -> int:
    """Count the GPUs of this machine or, without any, the cores that this process may use."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def _measure_here(choice: ModelChoice, global_batch: int, answer: str) -> None:
    """Measure on this rank; rank 0 writes the figures down."""
    named = build_named(choice, device="cpu")
    config = TrainConfig(batch_size=global_batch, progress=False)
    world = connect("auto", timeout_s=_SETUP_TIMEOUT_S)
    try:
        measured = measure(_task(named, config), world, lambda ids: named.batch(len(ids)))
        if world.is_main:
            memory_bytes = None
            if world.device.type == "cuda":
                memory_bytes = torch.cuda.get_device_properties(world.device).total_memory
            values = {
                "profile": measured.profile.to_json(),
                "copy_bytes_per_s": measured.copy_bytes_per_s,
                "device": world.device.type,
                "memory_bytes": memory_bytes,
            }
            Path(answer).write_text(json.dumps(values))
    finally:
        world.close()


def _task(named: NamedModel, config: TrainConfig) -> Task:
    model = named.model
    missing = [name for name in model.targets if name not in named.sample]
    if missing:
        raise ValueError(
            f"the sample batch has {', '.join(named.sample)}, but lacks the targets "
            f"{', '.join(missing)}; give them too"
        )
    trainable = frozenset(n for n, p in model.model.named_parameters() if p.requires_grad)
    return Task(model, model.loss_fn or _mean_square, adamw(), config, trainable)


def _mean_square(output: Tensor, target: object) -> Tensor:
    """Stand for the loss of a model that has none of its own; what it costs hardly counts."""
    return output.square().mean()

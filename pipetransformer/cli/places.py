"""Get what planning needs to know of a place: a described cluster, or the machine at hand."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autopipe.cluster import load_cluster, modelled_profile
from autopipe.loss import Loss, choose_loss
from autopipe.plan import PlanRequest
from autopipe.profile import Profile, ProfiledSublayer
from pipetransformer.cli.named_model import ModelChoice, NamedModel, build_named, build_shapes
from pipetransformer.config import TrainConfig, usual_prefix_chunk
from pipetransformer.elastic import complete_request
from pipetransformer.measure import measure
from pipetransformer.model import Task, adamw
from pipetransformer.processes import connect, launch


@dataclass(frozen=True)
class Place:
    """Hold what planning needs to know of a place.

    Args:
        num_slots, slots_per_node: device slots that would train.
        memory_bytes: of a slot; None if it is not known.
        reads_ahead: whether they are read while the step before computes, as on a GPU.
        assumed: what the model's name does not say, a sentence each.
    """

    name: str
    profile: Profile
    num_slots: int
    slots_per_node: int
    memory_bytes: int | None
    reads_ahead: bool = False
    assumed: tuple[str, ...] = ()


def described_place(choice: ModelChoice, cluster_file: str) -> Place:
    """Model the costs on a cluster that a file describes.

    Raises:
        ValueError: see `load_cluster`, `build_named` and `modelled_profile`.
    """
    cluster = load_cluster(cluster_file)
    named = build_named(choice, device="meta")
    profile = modelled_profile(profiled(named), named.sample, cluster)
    return Place(
        cluster.name,
        profile,
        cluster.num_slots,
        cluster.slots_per_node,
        cluster.memory_bytes,
        reads_ahead=True,
        assumed=_assumed(named.assumed, named.sample, named.masks.asked),
    )


def _assumed(
    sentences: tuple[str, ...], batch: Mapping[str, Tensor], asked: bool = False
) -> tuple[str, ...]:
    if "attention_mask" in batch:
        return (*sentences, "no sample is padded")
    return (*sentences, "each mask that its forward looks at is true") if asked else sentences


def profiled(named: NamedModel) -> list[ProfiledSublayer]:
    """Present a model's sublayers, on the meta device, to be counted, without the loss."""
    return [
        ProfiledSublayer(sub.name, sub.layer, sub.module, partial(_call, named, index))
        for index, sub in enumerate(named.model.sublayers)
    ]


def _call(
    named: NamedModel, index: int, hidden: Tensor | None, batch: Mapping[str, Tensor]
) -> Tensor:
    model, value = named.model, batch if hidden is None else hidden
    if index and model.is_recorded:
        # What blocks share, such as masks and rotations, is made once a micro-batch: not counted.
        with _disable_current_modes(), named.masks, torch.no_grad():
            model.call(index, value, sides=batch)
    with named.masks:
        return model.call(index, value, sides=batch)


def make_request(
    place: Place,
    *,
    global_batch: int,
    num_frozen: int,
    memory_limit_bytes: int | None = None,
    cached: bool = False,
    **further: Any,
) -> PlanRequest:
    """State what the Trainer would ask of its planner.

    Args:
        memory_limit_bytes: of a slot; None is the place's.
        cached: whether the frozen prefix's activations may come from the cache.
        further: fields of `PlanRequest`.
    Raises:
        ValueError: a value is out of range, or the place does not say how fast a cache is.
    """
    most = max(cost.layer for cost in place.profile.sublayers)
    if num_frozen > most:
        raise ValueError(
            f"{num_frozen} layers cannot be frozen; the model has {most} beside its "
            f"head, which never freezes: give 0 to {most}"
        )
    if cached and place.profile.cache_bytes_per_s is None:
        raise ValueError(
            f"{place.name} does not say how fast a cache is read; add "
            "cache_bytes_per_s to its file, or leave --cached out"
        )
    shape = place.num_slots, place.slots_per_node, global_batch, num_frozen
    chunk = usual_prefix_chunk(global_batch, place.num_slots)
    limit = place.memory_bytes if memory_limit_bytes is None else memory_limit_bytes
    request = PlanRequest(*shape, memory_limit_bytes=limit, prefix_chunk=chunk, **further)
    # Rows that are read for ever pay for being written at any rate.
    return complete_request(
        request, place.profile, rows_found=float(cached), on_gpu=place.reads_ahead
    )


def place_at_hand(choice: ModelChoice, *, num_slots: int, global_batch: int) -> Place:
    """Measure the costs of steps of `global_batch` samples here, in one process per slot.

    Raises:
        ValueError: the model cannot be built, or there is no slot.
        WorkerFailedError: measuring failed.
    """
    assumed: tuple[str, ...] = ()
    if not choice.is_own:  # A wrong name fails here, once, and not in every process.
        built = build_shapes(choice)
        assumed = _assumed(built.assumed, built.batch)
    with tempfile.TemporaryDirectory(prefix="pipetransformer-plan-") as folder:
        answer = Path(folder) / "answer.json"
        # Processes answer by a file, as `launch` returns nothing.
        launch(_measure_here, (choice, global_batch, str(answer)), num_slots=num_slots)
        values = json.loads(answer.read_text())
    measured = Profile.from_json(values["profile"])
    return Place(
        f"this machine, a {values['device'].upper()} for each slot",
        # The sample is made up, so reading it tells nothing of a dataset.
        replace(measured, read_s=0.0, fetch_s=0.0),
        num_slots,
        num_slots,
        values["memory_bytes"],
        reads_ahead=values["device"] == "cuda",
        assumed=assumed,
    )


def default_slots() -> int:
    """Count the GPUs of this machine or, without any, the cores that this process may use."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def _measure_here(choice: ModelChoice, global_batch: int, answer: str) -> None:
    """Measure on this rank; rank 0 writes the figures to a file."""
    named = build_named(choice, device="cpu")
    # A made-up sample may overflow a small dtype. Skipping leaves out the update, with a warning.
    config = TrainConfig(global_batch_size=global_batch, progress=False, on_nonfinite="skip")
    world = connect(config.device, timeout_s=config.setup_timeout_s)
    device, memory_bytes = world.device, None
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
    try:
        measured = measure(_task(named, config), world, lambda ids: named.batch(len(ids)))
        if world.is_main:
            place = {"device": device.type, "memory_bytes": memory_bytes}
            Path(answer).write_text(json.dumps({"profile": measured.to_json(), **place}))
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
    # A model without a loss gets a cheap one, whose cost hardly counts.
    stand_in = Loss(lambda output, target: output.square().mean(), is_exact=True)
    loss_fn = choose_loss(None, model.loss_fn or stand_in, model=type(model.model).__name__)
    return Task(model, loss_fn, adamw(), config, trainable)

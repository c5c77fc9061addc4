"""Measure the costs of a model on the machine at hand, in a process for each of its slots."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from autodp import gather_json
from autopipe import PipelinePlan
from pipetransformer.config import TrainConfig
from pipetransformer.data import Batch
from pipetransformer.device_memory import free_bytes, tightest
from pipetransformer.launch import launch
from pipetransformer.loss import Loss, choose_loss
from pipetransformer.measure import Measurements, measure
from pipetransformer.measure_throughput import measure_throughputs
from pipetransformer.named_model import ModelChoice, NamedModel, build_named
from pipetransformer.optimizer_state import adamw
from pipetransformer.plan_place import Place, make_request
from pipetransformer.planning import published_trials
from pipetransformer.task import Task
from pipetransformer.world import connect

_SETUP_TIMEOUT_S = 300.0


def place_at_hand(
    choice: ModelChoice,
    *,
    num_slots: int,
    global_batch: int,
    memory_limit_bytes: int | None = None,
    published: bool = False,
) -> Place:
    """Measure the costs on this machine, in one process per slot.

    Args:
        choice: the model.
        num_slots: processes to start; see `default_slots`.
        global_batch: samples of a step; micro-batches of it are measured.
        memory_limit_bytes: what a pipeline that is timed may take of a slot; None is what is free.
        published: whether to time what the published rules choose M from, too.
    Raises:
        ValueError: the model cannot be built, or there is no slot.
        WorkerFailedError: measuring failed.
    """
    if not choice.is_own:  # A mistake is better found here than by every process.
        build_named(choice, device="meta")
    with tempfile.TemporaryDirectory(prefix="pipetransformer-plan-") as folder:
        answer = Path(folder) / "answer.json"
        arguments = (choice, global_batch, memory_limit_bytes, published, str(answer))
        launch(_measure_here, arguments, num_slots=num_slots)
        values = json.loads(answer.read_text())
    return _measured_place(
        Measurements.from_json(values["measurements"]),
        num_slots=num_slots,
        device=values["device"],
        memory_bytes=values["memory_bytes"],
    )


def default_slots() -> int:
    """Count the GPUs of this machine or, without any, the cores that this process may use."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def _measure_here(
    choice: ModelChoice,
    global_batch: int,
    memory_limit_bytes: int | None,
    published: bool,
    answer: str,
) -> None:
    """Measure on this rank; rank 0 writes the figures down."""
    named = build_named(choice, device="cpu")
    # A made-up sample may overflow a small dtype: such steps are warned of, and lack the update.
    config = TrainConfig(batch_size=global_batch, progress=False, on_nonfinite="skip")
    world = connect("auto", timeout_s=_SETUP_TIMEOUT_S)
    device, memory_bytes = world.device, None
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory

    def read(ids: Tensor) -> Batch:
        return named.batch(len(ids))

    try:
        task = _task(named, config)
        measured = measure(task, world, read)
        if published:
            place = _measured_place(
                measured, num_slots=world.size, device=device.type, memory_bytes=memory_bytes
            )
            free = gather_json(free_bytes(device), group=world.group)
            trials = _published_trials(place, global_batch, tightest((memory_limit_bytes, *free)))
            tables = measure_throughputs(task, world, read=read, trials=trials)
            measured = replace(measured, throughputs=tables)
        if world.is_main:
            values = {
                "measurements": measured.to_json(),
                "device": device.type,
                "memory_bytes": memory_bytes,
            }
            Path(answer).write_text(json.dumps(values))
    finally:
        world.close()


def _measured_place(
    measured: Measurements, *, num_slots: int, device: str, memory_bytes: int | None
) -> Place:
    return Place(
        f"this machine, a {device.upper()} for each slot",
        # The sample is made up, so that reading it tells nothing of a dataset.
        replace(measured.profile, read_s=0.0, fetch_s=0.0),
        num_slots,
        num_slots,
        memory_bytes,
        measured.copy_bytes_per_s,
        measured.throughputs,
    )


def _published_trials(
    place: Place, global_batch: int, memory_limit_bytes: int | None
) -> dict[int, tuple[PipelinePlan, ...]]:
    """Return what the published rules want timed, or nothing where they can make no plan."""
    request = make_request(
        place,
        global_batch=global_batch,
        num_frozen=0,
        memory_limit_bytes=memory_limit_bytes,
        cached=False,
    )
    try:
        return published_trials(place.profile, request, scale_batch=False)
    except ValueError:
        return {}  # Their plan is asked for later, and the answer says what it lacks.


def _task(named: NamedModel, config: TrainConfig) -> Task:
    model = named.model
    missing = [name for name in model.targets if name not in named.sample]
    if missing:
        raise ValueError(
            f"the sample batch has {', '.join(named.sample)}, but lacks the targets "
            f"{', '.join(missing)}; give them too"
        )
    trainable = frozenset(n for n, p in model.model.named_parameters() if p.requires_grad)
    loss_fn = choose_loss(model, model.loss_fn or Loss(_mean_square, is_exact=True))
    return Task(model, loss_fn, adamw(), config, trainable)


def _mean_square(output: Tensor, target: object) -> Tensor:
    """Stand for the loss of a model that has none of its own; what it costs hardly counts."""
    return output.square().mean()

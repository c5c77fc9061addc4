"""Measure the costs of a model on the machine at hand, in a process for each of its slots."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from pipetransformer.config import TrainConfig
from pipetransformer.forecast.named_model import ModelChoice, NamedModel, build_named
from pipetransformer.forecast.place import Place
from pipetransformer.job import Task
from pipetransformer.loss import Loss, choose_loss
from pipetransformer.measure import Measurements, measure
from pipetransformer.optimizer import adamw
from pipetransformer.processes import connect, launch


def place_at_hand(choice: ModelChoice, *, num_slots: int, global_batch: int) -> Place:
    """Measure the costs on this machine, in one process per slot.

    Args:
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
    measured = Measurements.from_json(values)
    return Place(
        f"this machine, a {values['device'].upper()} for each slot",
        # The sample is made up, so that reading it tells nothing of a dataset.
        replace(measured.profile, read_s=0.0, fetch_s=0.0),
        num_slots,
        num_slots,
        values["memory_bytes"],
        measured.cache_bytes_per_s,
        reads_ahead=values["device"] == "cuda",
    )


def default_slots() -> int:
    """Count the GPUs of this machine or, without any, the cores that this process may use."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def _measure_here(choice: ModelChoice, global_batch: int, answer: str) -> None:
    """Measure on this rank; rank 0 writes the figures down."""
    named = build_named(choice, device="cpu")
    # A made-up sample may overflow a small dtype: such steps are warned of, and lack the update.
    config = TrainConfig(global_batch_size=global_batch, progress=False, on_nonfinite="skip")
    world = connect(config.device, timeout_s=config.setup_timeout_s)
    device, memory_bytes = world.device, None
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
    try:
        measured = measure(_task(named, config), world, lambda ids: named.batch(len(ids)))
        if world.is_main:
            place = {"device": device.type, "memory_bytes": memory_bytes}
            Path(answer).write_text(json.dumps({**measured.to_json(), **place}))
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
    # What it costs hardly counts.
    stand_in = Loss(lambda output, target: output.square().mean(), is_exact=True)
    loss_fn = choose_loss(None, model.loss_fn or stand_in, model=type(model.model).__name__)
    return Task(model, loss_fn, adamw(), config, trainable)

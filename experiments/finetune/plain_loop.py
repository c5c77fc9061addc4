"""Fine-tune as a user would without this project: plain PyTorch, on all cores.

    baseline            what trains
    ddp                 everything, in DistributedDataParallel where there are several processes
    ddp+freeze          the same layers are frozen at the same steps as elsewhere
    ddp+freeze+cache    and their activations are kept for each sample
    short               everything, on a schedule cut to a budget of seconds
    static              all but some bottom layers, from the start
    lora                low-rank updates of the attention's weights alone
    small               a model with half the layers

The order of samples, the schedule of the learning rate and the clipping are the Trainer's.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from autodp import shuffled
from experiments.finetune.freezing import policy_of
from experiments.finetune.frozen_part import FrozenPart
from experiments.finetune.options import RunOptions
from experiments.finetune.outputs import Outcome, write_outcome
from experiments.tasks.workload import Workload
from freeze import FreezeSchedule, NeverFreeze, Replay
from pipetransformer import EvalPrediction, named_optimizer, named_schedule
from pipetransformer.optimizer import decay_by_layer
from pipetransformer.predictions import PredictionOutput

_DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(options: RunOptions, workload: Workload) -> None:
    """Fine-tune, evaluate, and write the results on rank 0."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("nccl" if own_device().type == "cuda" else "gloo")
    try:
        loop = PlainLoop(options, workload, rank, size)
        outcome, found = loop.run()
        if rank == 0:
            write_outcome(options, workload, outcome, found)
    finally:
        if size > 1:
            dist.destroy_process_group()


def own_device() -> torch.device:
    """Return this process's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


class PlainLoop:
    """Train a workload's model in this process, one of `size`, on its GPU where it has one."""

    def __init__(self, options: RunOptions, workload: Workload, rank: int, size: int) -> None:
        if options.label_smoothing:
            raise ValueError("baselines train without label smoothing; leave it out")
        if options.layer_decay not in (None, 1) and options.baseline == "lora":
            raise ValueError("--baseline lora has no layers to decay by; give --layer_decay 1")
        self.options, self.workload, self.rank, self.size = options, workload, rank, size
        baseline = options.baseline
        self.device, self.dtype = own_device(), _DTYPES[options.precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=options.precision == "fp16")
        self.model = workload.build(baseline == "small").to(self.device)
        if baseline == "lora":
            self.model = with_lora(self.model)
        self.frozen = FrozenPart(self.model, keeps=baseline == "ddp+freeze+cache")
        if baseline == "static":
            self.frozen.freeze(options.static_layers)
        self.decide = frozen_by_step(options) if str(baseline).startswith("ddp+") else None
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        build = named_optimizer("adamw", options.learning_rate, weight_decay=options.weight_decay)
        if options.layer_decay not in (None, 1):
            build = decay_by_layer(build, self.frozen.layered, options.layer_decay)
        self.optimizer = build(named)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = named_schedule(options.lr_scheduler_type, warmup=options.warmup)
        num = len(workload.train_dataset)
        self.steps_per_epoch = -(-num // options.global_batch_size)
        self.max_steps = self.steps_per_epoch * options.num_train_epochs
        self.log: list[dict[str, Any]] = []
        self.train_s = 0.0

    def run(self) -> tuple[Outcome, PredictionOutput]:
        """Train to the end; return what came of it."""
        options, start = self.options, time.perf_counter()
        if options.baseline == "short":
            self.max_steps = self._steps_in(options.budget_s or 0.0)
        order, step = shuffled(len(self.workload.train_dataset), seed=options.seed), 0
        for epoch in range(-(-self.max_steps // self.steps_per_epoch)):
            batches, begin = self._batches(order(epoch)), time.perf_counter()
            for batch, ids in itertools.islice(batches, self.max_steps - step):
                loss = self._step(batch, ids, step, epoch)
                now = time.perf_counter()
                record = {"loss": loss, "frozen": self.frozen.depth, "seconds": now - begin}
                self.log.append({"kind": "step", "step": step, "epoch": epoch, **record})
                self.train_s, step, begin = self.train_s + now - begin, step + 1, now
            every = options.evaluate_every_epochs
            if every and (epoch + 1) % every == 0 and step < self.max_steps:
                metrics = dict(
                    self.evaluate(self.workload.eval_dataset, self.workload.judge).metrics
                )
                self.log.append({"kind": "evaluation", "step": step, **metrics})
        found = self.evaluate(self.workload.eval_dataset, self.workload.judge)
        metrics = dict(found.metrics)
        for name, dataset in self.workload.further.items():
            other = self.evaluate(dataset, self.workload.judge).metrics
            metrics |= {f"{name}_{key}": value for key, value in other.items()}
        self.log.append({"kind": "evaluation", "step": step, **metrics})
        if self.rank == 0:
            folder = Path(options.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(record) + "\n" for record in self.log)
            (folder / "records.jsonl").write_text(lines)
        total_s = time.perf_counter() - start
        details = {"kept_bytes": self.frozen.kept_bytes, "processes": self.size}
        return Outcome(metrics, self.train_s, total_s, step, details), found

    def _step(self, batch: Mapping[str, Tensor], ids: list[int], step: int, epoch: int) -> float:
        if self.decide is not None:
            self.frozen.freeze(self.decide(step, epoch))
        self.model.train()
        self.frozen.set_modes()
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss, _ = self.frozen.forward(self.workload.forward, self._wrapped(), batch, ids)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        nn.utils.clip_grad_norm_(parameters, self.options.max_grad_norm)
        factor = self.schedule(step, self.max_steps)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)

    def _wrapped(self) -> nn.Module:
        """Return what computes the forward: anew where other layers train, as DDP wants."""
        if self.size == 1:
            return self.model
        key = self.frozen.depth
        if getattr(self, "_wrapped_for", None) != key:
            self._ddp, self._wrapped_for = DistributedDataParallel(self.model), key
        return self._ddp

    def _batches(self, order: Tensor) -> Any:
        """Yield this process's part of every global batch, and its samples."""
        size, dataset = self.options.global_batch_size, self.workload.train_dataset
        parts = [part.chunk(self.size)[self.rank].tolist() for part in order.split(size)]
        loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_sampler=parts,
            num_workers=self.options.dataloader_num_workers,
            collate_fn=self.workload.collate_fn,
            pin_memory=self.device.type == "cuda",
        )
        for batch, ids in zip(loader, parts, strict=True):
            yield self._named(batch), ids

    def _named(self, batch: Any) -> dict[str, Tensor]:
        if isinstance(batch, (list, tuple)):
            batch = dict(zip(self.workload.names, batch, strict=True))
        return {name: entry.to(self.device, non_blocking=True) for name, entry in batch.items()}

    def evaluate(self, dataset: Any, judge: Any) -> PredictionOutput:
        """Return outputs and metrics over a data set; every process goes through all of it."""
        outputs, labels = [], []
        self.model.eval()
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=self.options.global_batch_size,
            collate_fn=self.workload.collate_fn,
        )
        with torch.no_grad():
            for batch in map(self._named, loader):
                with self._autocast():
                    _, output = self.workload.forward(self.model, batch)
                outputs.append(output.float().cpu())
                names = [
                    n for n in ("y", "labels", "start_positions", "end_positions") if n in batch
                ]
                labels.append([batch[name].cpu() for name in names])
        widest = max(one.shape[1] for one in outputs)
        padded = [
            nn.functional.pad(
                one, (0, 0) * (one.ndim - 2) + (0, widest - one.shape[1]), value=-100
            )
            for one in outputs
        ]
        columns: list[np.ndarray[Any, Any]] = [
            torch.cat(c).numpy() for c in zip(*labels, strict=True)
        ]
        label_ids: Any = columns[0] if len(columns) == 1 else tuple(columns) or None
        predictions = torch.cat(padded).numpy()
        metrics = dict(judge(EvalPrediction(predictions, label_ids)))
        return PredictionOutput(predictions, label_ids, metrics)

    def _steps_in(self, budget_s: float) -> int:
        """Return how many steps fit into a budget, by the time that a few take."""
        order = shuffled(len(self.workload.train_dataset), seed=self.options.seed)
        twin = PlainLoop(_as_ddp(self.options), self.workload, self.rank, self.size)
        times = []
        for number, (batch, ids) in enumerate(twin._batches(order(0))):
            begin = time.perf_counter()
            twin._step(batch, ids, number, 0)
            times.append(time.perf_counter() - begin)
            if number == 6:
                break
        return max(1, min(self.max_steps, int(budget_s / float(np.median(times[1:])))))


def frozen_by_step(options: RunOptions) -> Any:
    """Return (step, epoch) -> frozen layers, where these follow from the position alone.

    Raises:
        ValueError: they follow from gradients; another run's are repeated with --replay.
    """
    policy = policy_of(options.freeze, options.replay)
    if isinstance(policy, Replay):
        return lambda step, epoch: policy.at(step)
    if isinstance(policy, NeverFreeze):
        return lambda step, epoch: 0
    if isinstance(policy, FreezeSchedule):
        depths = [int(one) for one in options.freeze.partition(":")[2].split(",")]
        return lambda step, epoch: depths[min(epoch, len(depths) - 1)]
    raise ValueError(
        f"--freeze {options.freeze} follows from what is measured while training; give the "
        "baseline --replay RUN of such a run"
    )


def with_lora(model: nn.Module) -> nn.Module:
    """Return the model with low-rank updates of its attention, and a head that trains."""
    from peft import LoraConfig, get_peft_model  # Optional.

    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    attention = [name for name in ("query", "key", "value", "qkv") if name in names]
    heads = [name for name in ("classifier", "qa_outputs", "head", "pooler") if name in names]
    adapted: nn.Module = get_peft_model(
        model,
        LoraConfig(r=8, lora_alpha=16, target_modules=attention, modules_to_save=heads),
    )
    return adapted


def _as_ddp(options: RunOptions) -> RunOptions:
    return replace(options, baseline="ddp", budget_s=None)

"""Fine-tune as a user would without this project: plain PyTorch, on all cores or GPUs.

    baseline            what trains
    ddp                 everything, in DistributedDataParallel where there are several processes
    ddp+freeze          the same layers are frozen at the same steps as elsewhere
    ddp+freeze+cache    and their activations are kept for each sample, in one process
    short               everything, on a schedule cut to a budget of seconds
    static              all but some bottom layers, from the start
    lora                low-rank updates of the attention's weights, at a rate of their own
    small               a model with half the layers

The order of samples and their views, the schedule of the learning rate, the optimizer and the
clipping are the Trainer's.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from autodp import EpochOrder, broadcast_json, mix_seed, shuffled, shuffled_by_length
from experiments.finetune.baselines import KEEPS
from experiments.finetune.freezing import FrozenAt, frozen_at
from experiments.finetune.options import RunOptions
from experiments.finetune.outputs import Outcome, write_outcome
from experiments.finetune.usage import as_usage
from experiments.rivals.frozen_part import FrozenPart
from experiments.rivals.judging import judged
from experiments.rivals.models import build_model, without_lora
from experiments.rivals.views import Views
from experiments.tasks.workload import Workload
from pipetransformer import named_optimizer, named_schedule
from pipetransformer.checkpoint import write_model_folder
from pipetransformer.demo import RunQueueWait
from pipetransformer.feed import read_lengths
from pipetransformer.model import decay_by_layer
from pipetransformer.processes import World, connect
from pipetransformer.report import RECORDS_FILE, finite
from pipetransformer.stage import PredictionOutput

_DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_TIMEOUT_S = 600.0
_TRIAL_STEPS = 7


@dataclass(frozen=True)
class Part:
    """Hold a process's samples of a global batch, and how much their mean loss counts."""

    ids: list[int]
    weight: float


def train(options: RunOptions, workload: Workload) -> None:
    """Fine-tune, evaluate, and write the results on rank 0."""
    world = connect("auto", timeout_s=_TIMEOUT_S)
    try:
        with as_usage():
            loop = PlainLoop(options, workload, world)
        with RunQueueWait() as held_up:
            outcome, found = loop.run()
        outcome.details["held_up"] = held_up.share
        if world.is_main:
            folder = Path(options.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(finite(record)) + "\n" for record in loop.log)
            (folder / RECORDS_FILE).write_text(lines)
            model = without_lora(loop.model)
            state, processor = model.state_dict(), workload.processing_class
            write_model_folder(model, state, folder / "model", processor)
            write_outcome(options, workload, outcome, found)
    finally:
        world.close()


class PlainLoop:
    """Train a workload's model in this process, one of a world, on its GPU where it has one."""

    def __init__(self, options: RunOptions, workload: Workload, world: World) -> None:
        self.options, self.workload, self.world = options, workload, world
        keeps = options.baseline == KEEPS
        self.dtype = _DTYPES[options.precision]
        enabled = options.precision == "fp16"
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=enabled)
        self.model = build_model(options, workload).to(world.device)
        self.wrapped: nn.Module | None = None
        self.frozen, self.frozen_at = FrozenPart(self.model, keeps=keeps), _frozen_at(options)
        self.optimizer = self._optimizer()
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = named_schedule(
            options.lr_scheduler_type, warmup=options.warmup, learning_rate=max(self.rates)
        )
        self.steps_per_epoch = -(-len(workload.train_dataset) // options.global_batch_size)
        of_epochs = self.steps_per_epoch * options.num_train_epochs
        self.max_steps = min(of_epochs, options.max_steps or of_epochs)
        self._refuse_depths()
        self.log: list[dict[str, Any]] = []
        self.step, self.train_s = 0, 0.0

    def run(self) -> tuple[Outcome, dict[str, PredictionOutput]]:
        """Train to the end; return what came of it."""
        options, workload = self.options, self.workload
        if options.baseline == "short":
            self.max_steps = self._steps_in(options.budget_s or 0.0)
        order, start = self._order(options.global_batch_size), time.perf_counter()
        num_epochs = -(-self.max_steps // self.steps_per_epoch)
        for epoch in range(num_epochs):
            # So that masks of dropout do not depend on what has been evaluated.
            torch.manual_seed(mix_seed(options.seed, epoch, self.world.rank))
            ids = self._in_view(order(epoch), epoch)
            self._train_epoch(ids, epoch, is_last=epoch == num_epochs - 1)
            every = options.evaluate_every_epochs
            if self.step < self.max_steps and every and (epoch + 1) % every == 0:
                metrics = self.evaluate(workload.eval_dataset).metrics
                self.log.append({"kind": "evaluation", "step": self.step, **metrics})
        found = {"": self.evaluate(workload.eval_dataset)}
        metrics = dict(found[""].metrics)
        self.log.append({"kind": "evaluation", "step": self.step, **metrics})
        total_s = time.perf_counter() - start
        for name, dataset in workload.further.items():
            found[name] = self.evaluate(dataset)
            metrics |= {f"{name}_{key}": value for key, value in found[name].metrics.items()}
        details = {"kept_bytes": self.frozen.kept_bytes, "processes": self.world.size}
        return Outcome(metrics, self.train_s, total_s, self.step, details), found

    def _train_epoch(self, ids: Tensor, epoch: int, *, is_last: bool) -> None:
        begin = time.perf_counter()
        self._freeze(self.step, epoch)
        for batch, part in islice(self._batches(ids), self.max_steps - self.step):
            loss = self._step(batch, part, self.step, is_last=is_last)
            # In fp16 a step that overflows is left out.
            if not math.isfinite(loss) and not self.scaler.is_enabled():
                raise ValueError(f"step {self.step}: the loss is {loss}; lower --learning_rate")
            now = time.perf_counter()
            record = {"loss": loss, "frozen": self.frozen.depth, "seconds": now - begin}
            self.log.append({"kind": "step", "step": self.step, "epoch": epoch, **record})
            self.train_s, self.step, begin = self.train_s + now - begin, self.step + 1, now
            self._freeze(self.step, epoch)

    def evaluate(self, dataset: Any) -> PredictionOutput:
        """Return outputs and metrics over a data set; every process goes through all of it."""
        self.model.eval()
        batches = DataLoader(
            dataset,
            batch_size=self.options.global_batch_size,
            num_workers=self.options.dataloader_num_workers,
            collate_fn=self.workload.collate_fn,
        )

        def outputs() -> Iterator[tuple[Mapping[str, Tensor], Tensor]]:
            for batch in map(self._named, batches):
                with torch.no_grad(), self._autocast():
                    output = self.workload.forward(self.model, batch)[1]
                yield batch, output

        return judged(outputs(), self.workload.judge)

    def _optimizer(self) -> torch.optim.Optimizer:
        options = self.options
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        rate, decay = options.learning_rate, options.layer_decay
        if options.baseline == "lora":
            rate, decay = options.lora_learning_rate or 10 * rate, None
        build = named_optimizer("adamw", rate, weight_decay=options.weight_decay)
        if decay is not None:
            build = decay_by_layer(build, self.frozen.layered, decay)
        return build(named)

    def _order(self, batch_size: int) -> EpochOrder:
        options, dataset = self.options, self.workload.train_dataset
        if options.group_by_length and self.workload.length_entry is not None:
            lengths = read_lengths(dataset, self.workload.length_entry)
            return shuffled_by_length(lengths, seed=options.seed, batch_size=batch_size)
        return shuffled(len(dataset), seed=options.seed)

    def _in_view(self, ids: Tensor, epoch: int) -> Tensor:
        """Return the numbers of samples as an epoch sees them; see `Views`."""
        views = self.workload.num_views
        if views is None:
            return ids
        return ids + (epoch % views if views else epoch) * len(self.workload.train_dataset)

    def _refuse_depths(self) -> None:
        """Raise a ValueError where more layers are to freeze at some time than there are."""
        steps = range(self.max_steps)
        deepest = max(self.frozen_at(step, step // self.steps_per_epoch) for step in steps)
        # Where nothing freezes, layers need not be known; those of LoRA's model are not.
        if deepest and deepest > (num_layers := self.frozen.layered.num_layers):
            raise ValueError(f"{deepest} layers are to freeze, but {num_layers} can; give fewer")

    def _freeze(self, step: int, epoch: int) -> None:
        """Freeze what is to be frozen at a step; DDP is then to be made anew."""
        before = self.frozen.depth
        self.frozen.freeze(self.frozen_at(step, epoch))
        if self.frozen.depth != before:
            self.wrapped = None

    def _step(self, batch: Mapping[str, Tensor], part: Part, step: int, *, is_last: bool) -> float:
        """Take a step; return the loss of the global batch."""
        self.model.train()
        self.frozen.set_modes()
        self.optimizer.zero_grad(set_to_none=True)
        if self.wrapped is None:
            several = self.world.size > 1
            self.wrapped = DistributedDataParallel(self.model) if several else self.model
        with self._autocast():
            loss = part.weight * self.frozen.forward(
                self.workload.forward, self.wrapped, batch, part.ids, stores=not is_last
            )
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        nn.utils.clip_grad_norm_(parameters, self.options.max_grad_norm or math.inf)
        factor = self.schedule(step, self.max_steps)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.scaler.step(self.optimizer)
        self.scaler.update()
        mean = loss.detach()
        if self.world.size > 1:
            dist.all_reduce(mean)
        return mean.item() / self.world.size

    def _autocast(self) -> torch.autocast:
        enabled = self.dtype is not None
        return torch.autocast(self.world.device.type, self.dtype, enabled=enabled)

    def _batches(self, order: Tensor) -> Iterator[tuple[dict[str, Tensor], Part]]:
        """Yield this process's part of every global batch; what is kept is not read."""
        size = self.options.global_batch_size
        parts = [own_part(whole, self.world.rank, self.world.size) for whole in order.split(size)]
        held = [self.frozen.holds(part.ids) for part in parts]
        unread = [part.ids for part, is_held in zip(parts, held, strict=True) if not is_held]
        loader = iter(self._loader(unread))
        for part, was_held in zip(parts, held, strict=True):
            if not was_held:
                batch = next(loader)
            elif self.frozen.holds(part.ids):
                batch = self.frozen.held(part.ids)
            else:  # Layers have thawed since.
                batch = next(iter(self._loader([part.ids])))
            yield self._named(batch), part

    def _loader(self, parts: Sequence[list[int]]) -> DataLoader[Any]:
        dataset: Any = self.workload.train_dataset
        if self.workload.num_views is not None:
            dataset = Views(dataset, self.options.seed)
        return DataLoader(
            dataset,
            batch_sampler=parts,
            num_workers=self.options.dataloader_num_workers if parts else 0,
            collate_fn=self.workload.collate_fn,
            pin_memory=self.world.device.type == "cuda",
        )

    def _named(self, batch: Any) -> dict[str, Tensor]:
        if isinstance(batch, (list, tuple)):
            batch = dict(zip(self.workload.names, batch, strict=True))
        device = self.world.device
        return {name: entry.to(device, non_blocking=True) for name, entry in batch.items()}

    def _steps_in(self, budget_s: float) -> int:
        """Return about how many steps a budget is of, by the time that a few take, with reading.

        Where batches are grouped by length, the few are of all lengths. Rank 0's answer holds for
        all.
        """
        twin = PlainLoop(replace(self.options, baseline="ddp"), self.workload, self.world)
        times: list[float] = []
        begin = time.perf_counter()
        dataset = self.workload.train_dataset
        every = self._order(len(dataset))(0).split(self.options.global_batch_size)
        middles = [len(every) * (2 * one + 1) // (2 * _TRIAL_STEPS) for one in range(_TRIAL_STEPS)]
        # The first warms up, and is not counted.
        for batch, part in twin._batches(torch.cat([every[n] for n in (middles[0], *middles)])):
            twin._step(batch, part, len(times), is_last=True)
            times.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        fitting = round(budget_s / statistics.mean(times[1:]))
        (steps,) = broadcast_json([fitting], group=self.world.group)
        return max(1, min(self.max_steps, steps))


def _frozen_at(options: RunOptions) -> FrozenAt:
    if options.baseline == "static":
        return lambda step, epoch: options.static_layers
    return frozen_at(options.freeze, options.replay)


def own_part(whole: Tensor, rank: int, size: int) -> Part:
    """Return a rank's samples of a global batch: as even as may be.

    DDP takes the mean over ranks, so that a rank's mean loss counts by its share of the samples;
    one without samples goes through one that counts nothing.
    """
    own = whole.tensor_split(size)[rank]
    weight = len(own) * size / len(whole)
    return Part((own if len(own) else whole[:1]).tolist(), weight)

"""Repeat published experiments with GPipe at a scale that fits the machine.

A command lists its experiments at their published size. Here they are scaled down, trained for a
few steps on synthesized images, measured, and printed beside the published figures. The scale
multiplies channels, depth (but ResNet-101's) and the images' side; the batch, the micro-batches
and the partitions stay as they are. Minima keep a model meaningful: each says so where it is
given.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from autopipe.balance import balance_by_time
from autopipe.gpipe import GPipe
from experiments.benchmarks.measuring.rounds import num_cores

NUM_CLASSES = 1000

Row = dict[str, object]
Result = TypeVar("Result")


def scaled(value: int, scale: float, *, multiple: int = 1, minimum: int = 1) -> int:
    """Return the multiple nearest to value * scale, at least the minimum."""
    return max(minimum, multiple * round(value * scale / multiple))


@dataclass(frozen=True)
class ModelFamily:
    """Describe a family of models and what they train on.

    Args:
        build: makes the model of a size.
        shrink: returns a size times a scale.
        image_side: pixels, at scale 1.
        segments: whether the target is an image of one channel; else a class.
    """

    build: Callable[..., nn.Sequential]
    shrink: Callable[[tuple[int, ...], float], tuple[int, ...]]
    image_side: int
    segments: bool

    def on_meta(self, size: tuple[int, ...]) -> nn.Sequential:
        """Build a model of any size without memory for its parameters."""
        with torch.device("meta"):
            return self.build(*size)

    def batch(self, size: int, scale: float) -> tuple[Tensor, Tensor]:
        """Synthesize images and targets.

        The images have at least 64 pixels a side, so that the smallest map has 2 x 2: batch norm
        cannot train on one sample of 1 x 1.
        """
        side = scaled(self.image_side, scale, multiple=32, minimum=64)
        images = torch.rand(size, 3, side, side)
        if self.segments:
            return images, torch.rand(size, 1, side, side)
        return images, torch.randint(NUM_CLASSES, (size,))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss."""
        if self.segments:
            return nn.functional.mse_loss(output, target)
        return nn.functional.cross_entropy(output, target)


# Compared by identity: it is a key, and its columns cannot be hashed.
@dataclass(frozen=True, eq=False)
class Experiment:
    """Name one line of a published table, at the published size.

    Args:
        size: of the model, as its family counts it.
        num_partitions: None trains the plain model, without pipeline and checkpointing.
        checkpoint: as GPipe takes it.
        published: columns of the table, printed as they are.
    """

    name: str
    size: tuple[int, ...]
    num_partitions: int | None
    batch_size: int
    num_micro_batches: int = 1
    checkpoint: str = "except_last"
    published: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """Hold what the command line says."""

    table: str
    scale: float
    device: str
    partitions: tuple[int, ...]
    num_steps: int

    def devices(self, num: int) -> list[torch.device]:
        """Return a device for each partition; where there are fewer, partitions share them."""
        if self.device == "cpu":
            return [torch.device("cpu")] * num
        return [torch.device("cuda", i % torch.cuda.device_count()) for i in range(num)]


def parse_options(description: str | None, tables: Sequence[str]) -> Options:
    """Read the command line. An error ends the process."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=tables)
    parser.add_argument("--scale", type=float, help="1 is the published size; usually 0.125")
    parser.add_argument("--devices", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=3, help="measured, after one to warm up")
    given = parser.parse_args()
    scale = given.scale or (0.25 if given.table.startswith("resnet") else 0.125)
    if not 0 < scale <= 1:
        parser.error(f"--scale is {scale}; give a number over 0 and up to 1")
    if min(given.partitions) < 1 or given.steps < 1:
        parser.error("--partitions and --steps count from 1")
    if given.devices == "cuda" and not torch.cuda.is_available():
        parser.error("--devices cuda: torch finds no CUDA device here; use --devices cpu")
    return Options(given.table, scale, given.devices, tuple(given.partitions), given.steps)


class WarmExperiment:
    """Train an experiment's scaled model on one mini-batch, again and again.

    Args:
        balance: returns the layers of each partition; from their number, the model on the CPU, a
            mini-batch, the number of micro-batches and the first device.
        momentum: of SGD; with it a parameter takes 12 bytes in training, without it 8.
    """

    def __init__(
        self,
        workload: ModelFamily,
        experiment: Experiment,
        options: Options,
        *,
        balance: Callable[[int, nn.Sequential, Tensor, int, torch.device], list[int]],
        momentum: float = 0.0,
    ) -> None:
        torch.manual_seed(0)
        num_partitions, chunks = experiment.num_partitions or 1, experiment.num_micro_batches
        self.devices = options.devices(num_partitions)
        images, target = workload.batch(experiment.batch_size, options.scale)
        # A model for one device is drawn there: on the CPU two billion numbers take a minute.
        with self.devices[0] if num_partitions == 1 else torch.device("cpu"):
            model = workload.build(*workload.shrink(experiment.size, options.scale))
        self.num_parameters = count_parameters(model)
        self.model: nn.Module = model
        if experiment.num_partitions is None:
            self.model = model.to(self.devices[0])
        else:
            layers = [len(model)]
            if num_partitions > 1:
                layers = balance(num_partitions, model, images, chunks, self.devices[0])
            self.model = GPipe(
                model,
                layers,
                devices=self.devices,
                chunks=chunks,
                checkpoint=experiment.checkpoint,
            )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=momentum)
        self.images, self.target = images.to(self.devices[0]), target.to(self.devices[-1])
        self.loss = workload.loss

    def rate(self) -> float:
        """Take one step; return samples per second."""
        start = time.perf_counter()
        self.step()
        return len(self.images) / (time.perf_counter() - start)

    def step(self) -> None:
        """Take one step and wait for it."""
        # The published runs' PyTorch kept gradients allocated from step to step.
        self.optimizer.zero_grad(set_to_none=False)
        self.loss(self.model(self.images), self.target).backward()
        self.optimizer.step()
        for device in set(self.devices):
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def by_time(
    num: int, model: nn.Sequential, images: Tensor, chunks: int, device: torch.device
) -> list[int]:
    """Balance by the time of each layer on the device, for one micro-batch."""
    return balance_by_time(num, model.to(device), images.chunk(chunks)[0].to(device))


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def rounded(count: int) -> str:
    """Return a number of parameters as the published tables print it: 232.7M, 2.21B."""
    return f"{count / 1e6:.1f}M" if count < 1e9 else f"{count / 1e9:.2f}B"


def each_runnable(
    workload: ModelFamily,
    experiments: Sequence[Experiment],
    options: Options,
    run: Callable[[Experiment], Result],
) -> Iterator[tuple[Experiment, Result]]:
    """Run each experiment that can; say of another why it cannot."""
    for experiment in experiments:
        num = experiment.num_partitions or 1
        num_layers = len(workload.on_meta(workload.shrink(experiment.size, options.scale)))
        if num not in options.partitions:
            print(f"  skipped {experiment.name}: --partitions leaves {num} out")
        elif num > num_layers:
            print(f"  skipped {experiment.name}: {num_layers} layers for {num} partitions")
        else:
            try:
                yield experiment, run(experiment)
            except torch.cuda.OutOfMemoryError:
                print(f"  skipped {experiment.name}: out of memory at this scale")
        gc.collect()
        torch.cuda.empty_cache()


def described(workload: ModelFamily, experiment: Experiment, options: Options) -> Row:
    """Return the columns that say what was run."""
    size = workload.shrink(experiment.size, options.scale)
    return {
        "experiment": experiment.name,
        "parameters": rounded(count_parameters(workload.on_meta(experiment.size))),
        "scaled to": rounded(count_parameters(workload.on_meta(size))),
        "size": "x".join(map(str, size)),
        "batch": experiment.batch_size,
        "m": experiment.num_micro_batches,
    }


def run_speed(
    name: str, workload: ModelFamily, experiments: Sequence[Experiment], options: Options
) -> None:
    """Measure throughputs and print them with their ratio to the first experiment's.

    The experiments take turns, so that a change of the machine's load meets all of them. A
    speed-up is the median of the ratios within a turn.
    """
    print_header(options)
    print(f"  one step of each to warm up, then the median of {options.num_steps} turns")
    print("  more partitions than cores or devices share them and bring no speed-up")

    def warm(experiment: Experiment) -> WarmExperiment:
        training = WarmExperiment(workload, experiment, options, balance=by_time)
        training.step()
        return training

    running = dict(each_runnable(workload, experiments, options, warm))
    rates: dict[Experiment, list[float]] = {experiment: [] for experiment in running}
    for _ in range(options.num_steps):
        for experiment, training in running.items():
            rates[experiment].append(training.rate())
    rows = []
    for experiment in running:
        row = described(workload, experiment, options)
        row["samples/s"] = statistics.median(rates[experiment])
        # Without the first experiment there is nothing to compare to.
        row["speed-up"] = None
        if experiments[0] in rates:
            turns = zip(rates[experiment], rates[experiments[0]], strict=True)
            row["speed-up"] = statistics.median(rate / base for rate, base in turns)
        rows.append(row | dict(experiment.published))
    print_rows(name, rows, options)


def print_header(options: Options) -> None:
    """Say on what and how the runs are made."""
    if options.device == "cpu":
        where = f"{num_cores()} cores, one intra-op thread a partition"
    else:
        where = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    print(
        f"scale {options.scale:g}, {where}, torch {torch.__version__}; "
        f"SGD on one synthesized mini-batch, seed 0"
    )


def print_rows(name: str, rows: Sequence[Row], options: Options) -> None:
    """Print rows of the same columns as a table and, last, as one JSON line."""
    if rows:
        cells = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for first, *others in cells:
            line = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
            print("  " + "  ".join([first.ljust(widths[0]), *line]))
    run = {"scale": options.scale, "device": options.device, "torch": torch.__version__}
    print(json.dumps({"benchmark": name, **run, "rows": rows}))


def cell(value: object) -> str:
    """Return a value as the table prints it."""
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

"""Compare GPipe on thread links to the plain model, to the bubble's bound, and to torchgpipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch

from autopipe.balance import balance_by_time
from autopipe.gpipe import GPipe, StashedPipeline
from experiments.benchmarks.engine.stage_copies import (
    MICRO_BATCHES_A_RUN,
    StageCopy,
    run_in_threads,
)
from experiments.benchmarks.engine.workloads import (
    Contestant,
    Encoder,
    EngineModel,
    by_schedule,
    loss_of,
    plain,
    through_autograd,
    verify_all,
)
from experiments.benchmarks.measuring.rounds import (
    Comparison,
    Ratio,
    compare,
    faster,
    interleave,
    of_bubble_bound,
)

BATCHES_A_STREAM = 8
"""That a pipeline without flushes trains on before it runs empty."""


def balance_of(workload: EngineModel, num_stages: int) -> list[int]:
    """Return the layers of each partition: an encoder's blocks are equal, a U-Net's are timed."""
    if isinstance(workload, Encoder):
        return [workload.num_blocks // num_stages] * num_stages
    batch = workload.mini_batch()
    return balance_by_time(num_stages, workload.build(), batch.input[:4])


def pipeline(
    workload: EngineModel, balance: Sequence[int], *, chunks: int, checkpoint: str = "never"
) -> GPipe:
    """Wrap the workload's model, on CPU partitions."""
    devices = ["cpu"] * len(balance)
    return GPipe(workload.build(), balance, devices=devices, chunks=chunks, checkpoint=checkpoint)


def overhead_of_one_partition(workload: Encoder, num_pairs: int) -> Comparison:
    """Compare one partition with one micro-batch to the plain model: ours / plain.

    The batch is a quarter of the workload's: what GPipe adds weighs the more.
    """
    workload = replace(workload, batch_size=workload.batch_size // 4)
    batch = workload.mini_batch()
    contestants = {
        "ours": through_autograd(pipeline(workload, [workload.num_blocks], chunks=1), batch),
        "plain": through_autograd(workload.build(), batch),
    }
    verify_all(contestants, contestants["plain"])
    seconds = interleave(steps(contestants), num_rounds=num_pairs, warm_up=2)
    return compare(
        ("k1_overhead",),
        f"K=1 M=1 batch {workload.batch_size}, ours / plain model",
        seconds["ours"] / seconds["plain"],
        seconds["ours"],
        seconds["plain"],
    )


def steps(contestants: dict[str, Contestant]) -> dict[str, Callable[[], object]]:
    """Return what is to be timed."""
    return {name: contestant.step for name, contestant in contestants.items()}


def against_bound(
    workload: Encoder, num_stages: int, *, num_micro_batches: int, num_rounds: int
) -> list[Comparison]:
    """Compare the speed-up of both schedules to its bound, on thread links."""
    batch = workload.mini_batch()
    module = pipeline(workload, balance_of(workload, num_stages), chunks=num_micro_batches)
    base = plain(workload.build(), batch, num_micro_batches)
    ours = {
        "gpipe": through_autograd(module, batch),
        "1f1b": by_schedule(module, batch, "1f1b"),
    }
    verify_all(ours, base)
    hidden = batch.split(num_micro_batches)[0].input
    copies = [StageCopy.of(module.partitions[0], hidden) for _ in range(num_stages)]
    actions = steps(ours | {"plain": base}) | {
        "alone": partial(run_in_threads, copies[:1]),
        "together": partial(run_in_threads, copies),
    }
    seconds = interleave(actions, num_rounds=num_rounds)
    how = {"gpipe": "autograd, GPipe", "1f1b": "step, 1F1B"}
    return [
        of_bubble_bound(
            seconds,
            name,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            key=("of_bubble_bound", "threads", name) if num_stages == 2 else (),
            what=f"threads K={num_stages} M={num_micro_batches}, {how[name]}",
        )
        for name in ours
    ]


def without_flushes(
    workload: Encoder, num_stages: int, *, num_micro_batches: int, num_rounds: int
) -> list[Comparison]:
    """Compare asynchronous 1F1B to independent copies of a stage, and to 1F1B with its flushes.

    A round trains on a stream of batches; each takes an SGD update. The copies update nothing.
    """
    batch, balance = workload.mini_batch(), balance_of(workload, num_stages)
    stream = [(batch.input, batch.target)] * BATCHES_A_STREAM
    sgd = partial(torch.optim.SGD, lr=1e-3)
    ours = StashedPipeline(
        workload.build(),
        balance,
        optimizer=sgd,
        devices=["cpu"] * num_stages,
        chunks=num_micro_batches,
    )
    flushed = pipeline(workload, balance, chunks=num_micro_batches)
    optimizer = sgd(flushed.parameters())

    def train_flushed() -> None:
        for input, target in stream:
            flushed.step(input, target, loss_of, schedule="1f1b")
            optimizer.step()
            optimizer.zero_grad()

    hidden = batch.split(num_micro_batches)[0].input
    copies = [StageCopy.of(flushed.partitions[0], hidden) for _ in range(num_stages)]
    actions: dict[str, Callable[[], object]] = {
        "unflushed": partial(ours.train_on, stream, loss_of),
        "flushed": train_flushed,
        "together": partial(run_in_threads, copies),
    }
    seconds = interleave(actions, num_rounds=num_rounds)
    ideal_s = seconds["together"] / MICRO_BATCHES_A_RUN * num_micro_batches * len(stream)
    what = f"threads K={num_stages} M={num_micro_batches}"
    return [
        compare(
            ("unflushed_of_copies",),
            f"{what}, 1F1B without flushes / copies of a stage",
            ideal_s / seconds["unflushed"],
            seconds["unflushed"],
            ideal_s,
            peak_versions=ours.peak_versions,
        ),
        faster(
            seconds,
            "unflushed",
            "flushed",
            key=("unflushed_vs_flushed",),
            what=f"{what}, 1F1B without flushes / with them",
        ),
    ]


def against_torchgpipe(
    peer: ModuleType,
    workload: EngineModel,
    num_stages: int,
    *,
    num_micro_batches: int,
    checkpoints: Sequence[str],
    num_rounds: int,
) -> dict[str, Comparison]:
    """Compare to torchgpipe in each checkpoint mode; by mode.

    A U-Net's plain model joins in, as "plain model"; the encoder's is beside its bound.
    """
    batch, balance = workload.mini_batch(), balance_of(workload, num_stages)
    base = plain(workload.build(), batch, num_micro_batches)
    contestants: dict[str, Contestant] = {}
    for mode in checkpoints:
        module = pipeline(workload, balance, chunks=num_micro_batches, checkpoint=mode)
        contestants[f"ours {mode}"] = through_autograd(module, batch)
        contestants[f"torchgpipe {mode}"] = peer.contestant(
            workload, balance, batch, chunks=num_micro_batches, checkpoint=mode
        )
    verify_all(contestants, base)
    theirs = {f"torchgpipe {mode}": mode for mode in checkpoints}
    if not isinstance(workload, Encoder) and "never" in checkpoints:
        contestants["plain model"] = base
        theirs["plain model"] = "never"
    # The verified step has warmed up.
    seconds = interleave(steps(contestants), num_rounds=num_rounds, warm_up=0)
    where = f"{workload.name} K={num_stages} M={num_micro_batches}"
    return {
        mode if name != "plain model" else name: faster(
            seconds, f"ours {mode}", name, what=f"{where}, {mode} against {name.split()[0]}"
        )
        for name, mode in theirs.items()
    }


def peak_of_1f1b(workload: Encoder, num_stages: int, *, num_micro_batches: int) -> Comparison:
    """Count what stage 0 keeps at its peak: 1F1B / GPipe, in bytes of activations."""
    batch = workload.mini_batch()
    module = pipeline(workload, balance_of(workload, num_stages), chunks=num_micro_batches)
    peaks, in_flight = {}, {}
    for schedule in ("gpipe", "1f1b"):
        contestant = by_schedule(module, batch, schedule)
        contestant.step()
        with module.trace() as trace:
            contestant.step()
        stage = trace.summary().stages[0]
        in_flight[schedule], peaks[schedule] = stage.peak_in_flight, stage.peak_bytes
    ratio = peaks["1f1b"] / peaks["gpipe"]
    # Counted, not timed: the program alone decides it, and the interval is a point.
    return Comparison(
        ("peak_memory_ratio_1f1b_vs_gpipe",),
        f"K={num_stages} M={num_micro_batches}, bytes kept at stage 0",
        Ratio(ratio, ratio, ratio),
        1,
        facts={"peak_bytes": peaks, "micro_batches": in_flight},
    )

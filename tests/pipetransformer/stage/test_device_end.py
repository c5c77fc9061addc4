"""Prove that a step on a run's only GPU never waits for it, and trains as a CPU's does.

The GPU is a stand-in: see tests/helpers/stand_in_gpu.py.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.engine.executor import StageRun
from pipetransformer import Callback, NonFiniteError, Trainer, adamw, named_optimizer
from pipetransformer.stage.device_end import DeviceEnd
from tests.helpers.exploding import Exploding
from tests.helpers.marks import slow
from tests.helpers.stand_in_gpu import StandInGpu, put_on_gpu, stand_in_gpu

_NUM, _BATCH, _CLASSES = 64, 16, 3


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2)]
    head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 5, _CLASSES))
    return nn.Sequential(nn.Linear(8, 16), *blocks, head).double()


def make_data(*, ignored: int = 0, bad: int | None = None) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_NUM, 5, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(_CLASSES, (_NUM,), generator=generator)
    y[:ignored] = -100
    if bad is not None:
        x[bad] = math.nan
    return torch.utils.data.TensorDataset(x, y)


@contextlib.contextmanager
def on(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu | None]:
    """Have a GPU or none."""
    if device == "cpu":
        yield None
        return
    with stand_in_gpu() as gpu:
        yield gpu


def trainer_on(gpu: StandInGpu | None, data: Any, **settings: Any) -> tuple[Trainer, nn.Module]:
    model = make_model()
    if gpu is not None:
        put_on_gpu(model)
    settings = {
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": adamw(1e-2),
        "freeze": lambda context: min(2, 2 * context.epoch),
        "epochs": 3,  # Without, filling, and reading the cache.
        "global_batch_size": _BATCH,
        "pipeline_length": 1,
        **settings,
    }
    return Trainer(model, data, **settings), model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: getattr(p.detach(), "host", p.detach()).clone()
        for name, p in model.named_parameters()
    }


def run(
    device: str, monkeypatch: pytest.MonkeyPatch, data: Any, **settings: Any
) -> tuple[list[tuple[float, float, bool]], dict[str, Tensor]]:
    """Train to the end; return every step's numbers, and the weights."""
    with on(device, monkeypatch) as gpu:
        trainer, model = trainer_on(gpu, data, **settings)
        with trainer:
            results = [trainer.step() for _ in range(trainer.max_steps)]
            found = [(one.loss, one.gradient_norm, one.skipped) for one in results]
            return found, weights_of(model)


def assert_equal_runs(one: Any, other: Any) -> None:
    for step, (mine, others) in enumerate(zip(one[0], other[0], strict=True)):
        assert mine == pytest.approx(others, rel=1e-9, nan_ok=True), step
    for name, weight in one[1].items():
        difference = float((weight - other[1][name]).abs().max())
        assert difference <= 1e-9 + 1e-7 * float(weight.abs().max()), name


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - 1).square().mean()


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return a count that the host knows, and that is not the number of samples."""
    return (output - 1).square().sum(), 2 * len(output)


@pytest.mark.parametrize(
    ("loss_fn", "max_grad_norm"),
    [
        (nn.CrossEntropyLoss(), 0.5),
        (square, None),
        slow(nn.CrossEntropyLoss(), None),
        slow(square, 0.5),
        slow(counted, None),
    ],
)
def test_a_gpu_decides_as_the_host_does(
    loss_fn: Callable[..., Any], max_grad_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(ignored=20)
    settings = {"loss_fn": loss_fn, "max_grad_norm": max_grad_norm, "micro_batches": 2}
    ours = run("gpu", monkeypatch, data, **settings)
    assert_equal_runs(ours, run("cpu", monkeypatch, data, **settings))


def test_a_batch_in_which_nothing_counts_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"sample_order": lambda epoch: range(_NUM), "optimizer": adamw(weight_decay=0.0)}
    data = make_data(ignored=_BATCH)
    ours = run("gpu", monkeypatch, data, **settings)
    assert ours[0][0] == (0.0, 0.0, False)
    assert_equal_runs(ours, run("cpu", monkeypatch, data, **settings))


def test_a_warm_cached_step_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with on("gpu", monkeypatch) as gpu:
        assert gpu is not None
        trainer, _ = trainer_on(gpu, make_data(), max_grad_norm=1.0)
        elsewhere = count_elsewhere(gpu, monkeypatch)
        with trainer:
            while trainer.epoch < 2:
                trainer.step()
            trainer.step()  # The first of an epoch follows a decision.
            gpu.reset()
            elsewhere.clear()
            trainer.step()
            assert gpu.waits == Counter()
            launches = gpu.launches - elsewhere
            assert launches.total() <= 40, launches


def count_elsewhere(gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the launches of forwards, backwards and the optimizer."""
    counted: Counter[str] = Counter()

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before = gpu.launches.copy()
            try:
                return function(*args, **kwargs)
            finally:
                counted.update(gpu.launches - before)

        return wrapped

    for owner, name in (
        (StageRun, "_forward"),
        (StageRun, "_backward"),
        (torch.optim.AdamW, "step"),
    ):
        monkeypatch.setattr(owner, name, counting(getattr(owner, name)))
    return counted


def test_the_host_is_one_step_ahead_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    with on("gpu", monkeypatch) as gpu:
        trainer, _ = trainer_on(gpu, make_data(), freeze=None)
        real = torch.cuda.Event

        class Event(real):  # type: ignore[valid-type, misc]
            def synchronize(self) -> None:
                waited.append(trainer.global_step)

        with trainer:
            trainer.begin()  # Which measures with events.
            monkeypatch.setattr(torch.cuda, "Event", Event)
            for _ in range(3):
                trainer.step()
            # The first step's end was waited for within the second, which was launched before.
            assert waited == [1, 2]
            trainer.step()  # An epoch's last.
            assert waited == [1, 2, 3, 4]


def test_a_run_ends_with_the_weights_before_a_number_that_is_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = make_data(bad=_BATCH + 3)
    settings = {"sample_order": lambda epoch: range(_NUM), "freeze": None}
    with on("gpu", monkeypatch) as gpu:
        trainer, model = trainer_on(gpu, data, **settings)
        with pytest.raises(NonFiniteError, match=r"step 1: the loss is nan.*'x' of sample"):
            with trainer:
                trainer.step()
                good = weights_of(model)
                trainer.step()  # Bad, which the next one finds.
                trainer.step()
        for name, weight in weights_of(model).items():
            assert torch.equal(weight, good[name]), name


def test_a_run_that_such_a_number_has_ended_takes_no_further_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # They were recorded as fine, and updated nothing.
    data = make_data(bad=_BATCH + 3)
    settings = {"sample_order": lambda epoch: range(_NUM), "freeze": None}
    with on("gpu", monkeypatch) as gpu, trainer_on(gpu, data, **settings)[0] as trainer:
        for _ in range(2):
            trainer.step()
        with pytest.raises(NonFiniteError, match="step 1: .*'x' of sample"):
            trainer.step()
        for _ in range(2):
            with pytest.raises(NonFiniteError, match="step 1: .* ended there; resume from"):
                trainer.step()


def test_a_gradient_that_is_not_finite_is_found_where_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Block(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            return Exploding.apply(super().forward(value)) if self.training else value

    with on("gpu", monkeypatch) as gpu:
        torch.manual_seed(0)
        head = nn.Sequential(nn.Flatten(), nn.Linear(40, _CLASSES))
        model = nn.Sequential(nn.Linear(8, 8), Block(8, 8), nn.Linear(8, 8), head).double()
        put_on_gpu(model)
        with pytest.raises(NonFiniteError, match=r"step 0: .*gradient of sublayer '1' on rank 0"):
            with Trainer(model, make_data(), loss_fn=nn.CrossEntropyLoss()) as trainer:
                trainer.fit()
    assert gpu is not None


def test_a_skipped_step_leaves_weights_and_moments_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = make_data(bad=_BATCH + 3)
    settings = {"sample_order": lambda epoch: range(_NUM), "on_nonfinite": "skip"}
    with caplog.at_level(logging.WARNING):
        ours = run("gpu", monkeypatch, data, **settings)
    assert [skipped for _, _, skipped in ours[0]].count(True) == 3
    assert caplog.text.count("the step is skipped on all ranks") == 3
    assert_equal_runs(ours, run("cpu", monkeypatch, data, **settings))


def test_records_tell_of_every_step_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    class Listener(Callback):
        def __init__(self) -> None:
            self.records: list[tuple[str, int, float]] = []
            self.ended: list[int] = []

        def on_log(self, trainer: Any, record: Any) -> None:
            if record["kind"] in ("step", "epoch", "evaluation"):
                self.records.append((record["kind"], record["step"], record["loss"]))

        def on_step_end(self, trainer: Any, result: Any) -> None:
            self.ended.append(trainer.global_step)

    told = {}
    for device in ("gpu", "cpu"):
        listener = Listener()
        with on(device, monkeypatch) as gpu:
            trainer, _ = trainer_on(
                gpu, make_data(), callbacks=[listener], eval_dataset=make_data(), epochs=2
            )
            with trainer:
                report = trainer.fit()
        told[device] = listener.records, listener.ended, report.samples
    for mine, others in zip(told["gpu"][0], told["cpu"][0], strict=True):
        assert mine == (*others[:2], pytest.approx(others[2], rel=1e-9))
    assert told["gpu"][1:] == told["cpu"][1:]


def test_an_optimizer_that_heeds_no_flag_has_the_host_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeviceEnd, "finish", None)  # Nobody calls it.
    settings = {"optimizer": named_optimizer("sgd", 1e-2, momentum=0.9), "max_grad_norm": 0.5}
    ours = run("gpu", monkeypatch, make_data(), **settings)
    assert_equal_runs(ours, run("cpu", monkeypatch, make_data(), **settings))

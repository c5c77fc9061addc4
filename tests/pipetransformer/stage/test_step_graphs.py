"""Prove that a captured step trains as a launched one does, in every bit, by one launch.

The GPU is a stand-in, which undoes what runs in a capture, and fills with NaN before a replay
whatever a graph must not read: see tests/helpers/stand_in_gpu.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetransformer import Trainer, adamw, named_optimizer
from pipetransformer.stage import step_graphs
from pipetransformer.stage.step_graphs import StepGraphs
from tests.helpers.marks import slow
from tests.helpers.stand_in_gpu import CUDA, StandInGraph, put_on_gpu, stand_in_gpu

_NUM, _BATCH, _CLASSES = 56, 16, 3  # An epoch's last batch is smaller.


class Block(nn.Module):
    """Hold what tests change of a block."""

    def __init__(self, dropout: float, act: Callable[[nn.Module, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(12, 12), nn.LayerNorm(12), dropout
        self.factor, self.act = 1.0, act

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.linear(self.norm(x)), self.dropout, self.training)
        y = y if self.act is None else self.act(self, y)
        return x + self.factor * torch.nn.functional.gelu(y)


def make_model(dropout: float = 0.0, act: Any = None, num_blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(dropout, act) for _ in range(num_blocks)]
    head = nn.Sequential(nn.Flatten(), nn.Linear(60, _CLASSES))
    return nn.Sequential(nn.Linear(8, 12), *blocks, head)


def make_data(bad: int | None = None) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_NUM, 5, 8, generator=generator)
    if bad is not None:
        x[bad] = math.nan
    return torch.utils.data.TensorDataset(x, torch.randint(_CLASSES, (_NUM,), generator=generator))


class Run:
    """Train to the end, by graphs, or by the same kernels one by one."""

    def __init__(
        self,
        captures: bool,
        *,
        model: nn.Module | None = None,
        data: Any = None,
        edit: Callable[[Trainer, nn.Module], None] | None = None,
        **settings: Any,
    ) -> None:
        with stand_in_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
            if not captures:
                patch.setattr(StepGraphs, "run", lambda *_: False)
            self.model = make_model() if model is None else model
            put_on_gpu(self.model)
            settings = {
                "loss_fn": nn.CrossEntropyLoss(),
                "optimizer": adamw(1e-2),
                "freeze": lambda context: min(1, context.epoch // 2),
                "epochs": 4,
                "global_batch_size": _BATCH,
                "pipeline_length": 1,
                "learning_rate_schedule": lambda step, max_steps: 8 / (8 + step),
                "max_grad_norm": 1.0,
                "cuda_graph": True,
                **settings,
            }
            trainer = Trainer(self.model, data or make_data(), **settings)
            self.results, self.launches, self.waits = [], [], []
            with trainer:
                while trainer.global_step < trainer.max_steps:
                    if edit is not None:
                        edit(trainer, self.model)
                    gpu.reset()
                    result = trainer.step()
                    self.launches.append(gpu.launches.copy())
                    self.waits.append(gpu.waits.copy())
                    self.results.append((result.loss, result.gradient_norm, result.skipped))
                self.evaluated = trainer.evaluate() if "eval_batch_size" in settings else {}
                self.drawn = torch.rand(3), torch.rand(3, device=CUDA).host  # type: ignore[attr-defined]
                self.state = {k: v.clone() for k, v in trainer.state_dict().items()}
                optimizer = trainer._deployment.stage.trained.optimizer
                assert optimizer is not None
                self.moments = [
                    getattr(one, "host", one).clone()
                    for state in optimizer.state.values()
                    for one in state.values()
                ]

    @property
    def num_replays(self) -> int:
        return sum(1 for launches in self.launches if launches["graph"])


def assert_same(one: Run, other: Run) -> None:
    """Compare every number, weight, moment, and what generators would draw next."""
    torch.testing.assert_close(one.results, other.results, rtol=0, atol=0, equal_nan=True)
    for mine, others in (
        (list(one.state.values()), list(other.state.values())),
        (one.moments, other.moments),
        (one.drawn, other.drawn),
    ):
        torch.testing.assert_close(mine, others, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dropout", "micro_batches"), [(0.1, 1), slow(0.0, 1), slow(0.0, 2), slow(0.1, 2)]
)
def test_replays_train_as_launches_do(dropout: float, micro_batches: int) -> None:
    settings: dict[str, Any] = {"micro_batches": micro_batches, "eval_dataset": make_data()}
    ours = Run(True, model=make_model(dropout), **settings)
    assert_same(ours, Run(False, model=make_model(dropout), **settings))
    # Of two shapes the first batch is launched, and captured anew where a layer freezes.
    assert ours.num_replays == 16 - 2 - 2


def test_a_replay_is_one_launch() -> None:
    ours = Run(True, freeze=None, epochs=3)
    warm = ours.launches[9]
    # The batch comes to the GPU, and to where the graph reads it; two groups have a rate each.
    assert warm == {"graph": 1, "_to_copy": 2, "copy_": 3, "fill_": 2}
    assert not ours.waits[9]


def test_only_sublayers_that_draw_are_seeded() -> None:
    ours = Run(True, model=make_model(0.1), freeze=None, epochs=3)
    assert ours.launches[9]["graph"] == 2  # The first one begins before all.


def test_the_model_s_own_loss_and_accumulated_counts_are_captured() -> None:
    data = make_data()
    data.tensors[1][::5] = -100  # What does not count differs by batch.
    assert_same(Run(True, data=data, epochs=3), Run(False, data=data, epochs=3))


def test_bad_steps_are_skipped_within_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"data": make_data(bad=20), "on_nonfinite": "skip"}
    ours = Run(True, **settings)
    assert_same(ours, Run(False, **settings))
    assert [skipped for _, _, skipped in ours.results].count(True) == 4
    assert ours.num_replays == 12


def halve_in_place(weight: Tensor) -> None:
    weight.mul_(0.5)


def halve_elsewhere(weight: Tensor) -> None:
    weight.data = weight.data.clone() * 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("change", "num_captures"), [(halve_in_place, 2), (halve_elsewhere, 4)])
def test_a_weight_s_new_memory_is_captured_anew(
    change: Callable[[Tensor], None], num_captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = count_captures(monkeypatch)

    def edit(trainer: Trainer, model: nn.Module) -> None:
        if trainer.global_step == 10:
            with torch.no_grad():
                change(model[1].linear.weight)

    ours = Run(True, edit=edit, freeze=None)
    assert len(captured) == num_captures
    assert_same(ours, Run(False, edit=edit, freeze=None))


def test_the_only_graph_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = count_captures(monkeypatch)

    def edit(trainer: Trainer, model: nn.Module) -> None:
        if trainer.global_step == 4:
            with torch.no_grad():
                model[1].linear.weight.data = model[1].linear.weight.data.clone() * 0.5

    settings: dict[str, Any] = {"edit": edit, "freeze": None, "global_batch_size": 28}
    ours = Run(True, **settings)
    assert (len(captured), ours.num_replays) == (2, 7)
    assert_same(ours, Run(False, **settings))


class _Frozen(nn.Module):
    """Hold a weight that never trains, beside one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.lora = nn.Linear(12, 12).requires_grad_(False), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora(x)


def test_a_frozen_weight_s_new_memory_is_captured_anew() -> None:
    def model() -> nn.Sequential:
        blocks = [*make_model()]
        return nn.Sequential(blocks[0], _Frozen(), *blocks[1:])

    def edit(trainer: Trainer, model: nn.Module) -> None:
        if trainer.global_step == 5:
            weight = model[1].base.weight
            weight.data = weight.data.clone() * 0.5

    settings: dict[str, Any] = {"edit": edit, "freeze": None, "epochs": 2}
    ours = Run(True, model=model(), **settings)
    assert_same(ours, Run(False, model=model(), **settings))


class _Padded(torch.utils.data.Dataset[Any]):
    """Give batches of 4 samples of one length each: 3 for "A", 5 for "B"."""

    def __init__(self, batches: str) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return 4 * len(self._batches)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        length = {"A": 3, "B": 5}[self._batches[index // 4]]
        return torch.full((length, 8), (index + 1) / 48), index % _CLASSES


def cache_by_length(block: nn.Module, y: Tensor) -> Tensor:
    """Scale by what is computed where the last text had another length."""
    length = y.shape[1]
    if len(getattr(block, "scale", ())) != length:
        block.scale = torch.arange(length, device=y.device).float()[:, None] / length
    scale: Tensor = block.scale
    return y * scale


@pytest.mark.parametrize("batches", ["ABABA", slow("AABBA")])
def test_what_a_forward_keeps_for_a_length_stays(batches: str) -> None:
    def model() -> nn.Sequential:
        blocks = make_model(0.0, cache_by_length)[:-1]
        return nn.Sequential(*blocks, nn.Sequential(_Mean(), nn.Linear(12, _CLASSES)))

    settings: dict[str, Any] = {
        "data": _Padded(batches), "global_batch_size": 4, "freeze": None, "epochs": 1,
        "sample_order": lambda epoch: range(4 * len(batches)), "collate_fn": padded,
        "eval_dataset": _Padded("BB"), "eval_batch_size": 4,
    }  # fmt: skip
    ours, launched = Run(True, model=model(), **settings), Run(False, model=model(), **settings)
    assert_same(ours, launched)
    assert ours.evaluated == launched.evaluated


def late_gradient(block: nn.Module, y: Tensor) -> Tensor:
    factors: Tensor = block.factors
    return y * factors if block.factor != 1 else y


@pytest.mark.slow
def test_moments_are_never_made_in_a_capture(caplog: pytest.LogCaptureFixture) -> None:
    def model() -> nn.Sequential:
        model = make_model(0.0, late_gradient)
        for block in model[1:3]:
            block.factors = nn.Parameter(torch.ones(12))
        return model

    def edit(trainer: Trainer, model: nn.Module) -> None:
        if trainer.global_step == 1:
            model[1].factor = 0.5

    settings: dict[str, Any] = {
        "freeze": None, "epochs": 2, "global_batch_size": 28, "edit": edit,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        ours = Run(True, model=model(), **settings)
    assert "gets its first gradient in a captured step" in caplog.text
    assert_same(ours, Run(False, model=model(), **settings))


def test_moments_that_are_replaced_are_captured_anew() -> None:
    def edit(trainer: Trainer, model: nn.Module) -> None:
        if trainer.global_step == 5:
            optimizer = trainer._deployment.stage.trained.optimizer
            assert optimizer is not None
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"] * 0.5

    settings: dict[str, Any] = {"edit": edit, "freeze": None, "epochs": 2}
    assert_same(Run(True, **settings), Run(False, **settings))


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    captured: list[str] = []
    begin = StandInGraph.capture_begin

    def counting(self: StandInGraph, *args: Any, **kwargs: Any) -> None:
        captured.append("begun")
        begin(self, *args, **kwargs)

    monkeypatch.setattr(StandInGraph, "capture_begin", counting)
    return captured


def test_what_a_forward_reads_besides_tensors_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_graphs, "_LOOKS_EVERY", 4)

    def edit(trainer: Trainer, model: nn.Module) -> None:
        if trainer.global_step == 9:
            model[1].factor = 0.5

    with caplog.at_level(logging.WARNING):
        ours = Run(True, edit=edit, freeze=None, epochs=3)
    assert "the model's forward gives another loss in step 10 than its captured" in caplog.text
    assert "steps 5 to 10 trained with what it was before" in caplog.text
    assert not any(launches["graph"] for launches in ours.launches[11:])


@pytest.mark.slow
def test_looks_find_nothing_where_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "_LOOKS_EVERY", 2)
    ours = Run(True, model=make_model(0.1))
    assert ours.num_replays == 12
    assert_same(ours, Run(False, model=make_model(0.1)))


def read_a_value(block: nn.Module, y: Tensor) -> Tensor:
    return y * float(y.detach().abs().max() > 0)


def bring_from_the_host(block: nn.Module, y: Tensor) -> Tensor:
    return y * torch.full((12,), 0.5).to(y.device)


def draw_on_the_host(block: nn.Module, y: Tensor) -> Tensor:
    return y * float(torch.rand(())) if block.training else y


def recompute_dropout(block: nn.Module, y: Tensor) -> Tensor:
    """Run again in the backward, with the random numbers that the forward drew."""
    dropout = partial(nn.functional.dropout, p=0.1, training=block.training)
    again: Tensor = checkpoint(lambda y: dropout(y).relu(), y, use_reentrant=False)
    return again


def fail_in_a_capture(block: nn.Module, y: Tensor) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("not here")
    return y


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (read_a_value, "step 1 cannot be captured: RuntimeError: CUDA error: _local_scalar_de"),
        slow(bring_from_the_host, "step 1 cannot be captured: RuntimeError: CUDA error: upload"),
        slow(recompute_dropout, "RuntimeError: another seed cannot be set during a capture"),
        (draw_on_the_host, "the model draws random numbers on the host"),
        slow(fail_in_a_capture, "step 1 cannot be captured: ValueError: not here"),
    ],
)
def test_what_cannot_be_captured_is_launched(
    act: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    # With dropout, which torch refuses behind a capture that has failed.
    settings: dict[str, Any] = {"freeze": None, "epochs": 2, "global_batch_size": 28}
    with caplog.at_level(logging.WARNING):
        ours = Run(True, model=make_model(0.1, act), **settings)
    assert [one for one in caplog.messages if "cuda_graph" in one and why in one]
    assert caplog.text.count("launched one by one") == 1
    assert ours.num_replays == 0
    assert_same(ours, Run(False, model=make_model(0.1, act), **settings))


def test_hooks_are_called(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = make_model(), []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    with caplog.at_level(logging.WARNING):
        ours = Run(True, model=model, freeze=None, epochs=2)
    assert "a Block has hooks, which a replay does not call" in caplog.text
    assert ours.num_replays == 0
    assert len(seen) >= 8


def test_hooks_that_come_later_are_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_graphs, "_LOOKS_EVERY", 4)
    seen: list[int] = []

    def edit(trainer: Trainer, model: nn.Module) -> None:
        if trainer.global_step == 6:
            model[1].register_forward_hook(lambda *_: seen.append(trainer.global_step))

    Run(True, edit=edit, freeze=None)
    assert "a Block has hooks, which a replay does not call" in caplog.text
    assert seen[-6:] == [*range(10, 16)]


def with_step_hook(named: Any) -> torch.optim.Optimizer:
    optimizer = adamw(1e-2)(named)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize("whose", ["AdamW", slow("global registry")])
def test_hooks_of_all_modules_and_of_the_optimizer_are_called(
    whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    handle = None
    if whose != "AdamW":
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    optimizer = with_step_hook if whose == "AdamW" else adamw(1e-2)
    try:
        with caplog.at_level(logging.WARNING):
            ours = Run(True, freeze=None, max_steps=3, optimizer=optimizer)
    finally:
        if handle is not None:
            handle.remove()
    assert f"a {whose} has hooks, which a replay does not call" in caplog.text
    assert ours.num_replays == 0


def round_by_mode(block: nn.Module, y: Tensor) -> Tensor:
    """Compute as kernels do that are chosen by whether a gradient is asked for."""
    return y * (1.0 if torch.is_grad_enabled() else 1.001)


@pytest.mark.slow
def test_looks_compute_as_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "_LOOKS_EVERY", 2)
    settings: dict[str, Any] = {"freeze": None, "global_batch_size": 28, "epochs": 3}
    assert Run(True, model=make_model(0.0, round_by_mode), **settings).num_replays == 5


def test_no_graph_is_empty_where_the_first_sublayer_draws() -> None:
    blocks = [*make_model()]
    model = nn.Sequential(nn.Sequential(blocks[0], nn.Dropout(0.1)), *blocks[1:])
    ours = Run(True, model=model, freeze=None, global_batch_size=28, epochs=2)
    assert [launches["graph"] for launches in ours.launches] == [0, 1, 1, 1]


@pytest.mark.slow
def test_captures_get_the_memory_of_launched_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = count_captures(monkeypatch)

    def edit(trainer: Trainer, model: nn.Module) -> None:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: captured.append("emptied"))

    Run(True, edit=edit, freeze=None, global_batch_size=28, epochs=1)
    assert captured == ["emptied", "begun"]


class _Lengths(torch.utils.data.Dataset[Any]):
    """Give each batch another length."""

    def __len__(self) -> int:
        return 4 * 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1 + index // 4, 8), float(index) / 48), index % _CLASSES


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Pad to the longest of a batch."""
    x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return x, torch.tensor([y for _, y in samples])


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def test_more_shapes_than_are_captured_are_launched(caplog: pytest.LogCaptureFixture) -> None:
    def model() -> nn.Sequential:
        head = nn.Sequential(_Mean(), nn.Linear(12, _CLASSES))
        return nn.Sequential(*make_model()[:-1], head)

    settings: dict[str, Any] = {
        "data": _Lengths(), "global_batch_size": 4, "freeze": None, "epochs": 2,
        "sample_order": lambda epoch: range(40), "collate_fn": padded,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        ours = Run(True, model=model(), **settings)
    assert "batches have had 8 shapes" in caplog.text
    assert ours.num_replays == 8
    assert_same(ours, Run(False, model=model(), **settings))


def test_a_resumed_run_goes_on_in_the_same_bits(tmp_path: Path) -> None:
    whole = Run(True, epochs=3)
    Run(True, epochs=3, folder=tmp_path, checkpoint_every_steps=6, max_steps=8)
    resumed = Run(True, epochs=3, folder=tmp_path, checkpoint_every_steps=6, resume=True)
    assert 0 < resumed.num_replays < len(resumed.results) < 12
    assert resumed.results == whole.results[-len(resumed.results) :]
    torch.testing.assert_close(resumed.state, whole.state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("on_gpu", "settings", "why"),
    [
        (False, {}, "the run is on 'cpu', and not on a GPU"),
        (True, {"precision": "fp16"}, "the host decides on updates"),
        (True, {"optimizer": named_optimizer("sgd", 1e-2)}, "not torch's fused Adam or AdamW"),
    ],
)
def test_what_cannot_ever_be_captured_is_said_first(
    on_gpu: bool, settings: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with stand_in_gpu() as gpu, caplog.at_level(logging.WARNING):
        model = make_model()
        if on_gpu:
            put_on_gpu(model)
        device = "cuda" if on_gpu else "cpu"
        given = {"loss_fn": nn.CrossEntropyLoss(), "epochs": 1, "device": device, **settings}
        with Trainer(model, make_data(), cuda_graph=True, **given) as trainer:
            trainer.step()
    assert "cuda_graph has no effect" in caplog.text
    assert why in caplog.text
    assert not gpu.launches["graph"]

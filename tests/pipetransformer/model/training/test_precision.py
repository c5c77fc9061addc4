"""Prove what low precision computes in, what is refused before, and how the scale moves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.loss import Loss
from pipetransformer import LayeredModel, Trainer, adamw
from pipetransformer.checks.model_checks import about_full_float32, about_low_weights
from pipetransformer.config import TrainConfig
from pipetransformer.model import LossScale, Task, adapt
from pipetransformer.model.training.precision import GROWTH_INTERVAL_STEPS
from tests.helpers.adapted import MODELS, batch_for, targets_for
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.models import Entries, tiny_data, tiny_model, tiny_trainer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
QUICK = {("timm", "fp16"), ("bert_tokens", "bf16"), ("distilbert_tokens", "fp16")}


def tiny() -> LayeredModel:
    return adapt(tiny_model(dtype=torch.float32))


def task_in(name: str | None, layered: LayeredModel) -> Task:
    loss_fn, config = Loss(nn.CrossEntropyLoss()), TrainConfig(precision=name)
    return Task(layered, loss_fn, adamw(), config, frozenset())


def run(layered: LayeredModel, name: str) -> list[Tensor]:
    """Return every sublayer's output."""
    task = task_in(name, layered)
    batch = {"x": tiny_data(dtype=torch.float32).tensors[0]}
    outputs: list[Tensor] = []
    for index in range(len(layered.sublayers)):
        value = outputs[-1] if outputs else batch
        outputs.append(task.call(index, value, sides=batch))
    return outputs


@pytest.mark.parametrize("name", DTYPES)
def test_sublayers_give_what_one_autocast_around_the_model_gives(name: str) -> None:
    layered, batch = tiny(), {"x": tiny_data(dtype=torch.float32).tensors[0]}
    outputs = run(layered, name)
    assert outputs[-1].dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=DTYPES[name]):
        plain = layered.model(batch["x"])
    assert plain.dtype == DTYPES[name] and torch.equal(outputs[-1], plain.float())


@pytest.mark.parametrize("precision", DTYPES)
def test_gradients_of_micro_batches_add_up_in_float32(precision: str) -> None:
    layered = tiny()
    parameters = dict(layered.model.named_parameters())
    run(layered, precision)[-1].sum().backward()
    once = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    assert once.keys() == parameters.keys()
    run(layered, precision)[-1].sum().backward()
    run(layered, precision)[-1].sum().backward()
    for name, parameter in parameters.items():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, 3 * once[name]), name


def test_without_a_precision_nothing_is_cast() -> None:
    layered = adapt(tiny_model())
    batch = {"x": tiny_data().tensors[0]}
    assert task_in(None, layered).call(0, batch, sides=batch).dtype == torch.float64


def test_a_weight_that_a_checkpoint_in_a_sublayer_casts_keeps_its_gradient() -> None:
    class Recomputed(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            first = torch.utils.checkpoint.checkpoint(super().forward, hidden, use_reentrant=True)
            return super().forward(first)

    torch.manual_seed(0)
    layered = adapt(nn.Sequential(nn.Linear(8, 4), Recomputed(4, 4), nn.Linear(4, 3)))
    run(layered, "bf16")[-1].sum().backward()
    one = dict(layered.model.named_parameters())["1.weight"]
    assert one.grad is not None and bool(one.grad.abs().sum() > 0)


def train(model: nn.Module | LayeredModel, data: Any, **settings: Any) -> Trainer:
    """Take two steps, with all that precedes them, and evaluate."""
    options = {"global_batch_size": 4, "epochs": 2, "progress": False, **settings}
    with Trainer(model, data, **options) as trainer:
        trainer.step()
        trainer.step()
        trainer.evaluate(data)
        return trainer


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name) if (kind, name) in QUICK else slow(kind, name)
        for kind, name in itertools.product(MODELS, DTYPES)
        if kind != "sequential"
    ],
)
def test_models_of_every_adapter_train(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    data = Entries({**batch_for(model), **targets_for(model)})
    with measuring(never):
        trainer = train(model, data, precision=name)
    assert trainer.is_over


class TakesTheMean(nn.Module):
    """Take off a batch's mean, which a split changes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(dim=0)


@pytest.mark.parametrize("name", DTYPES)
def test_a_layer_that_mixes_samples_is_still_refused(name: str) -> None:
    model = tiny_model(dtype=torch.float32)
    model.insert(2, TakesTheMean())
    data = tiny_data(dtype=torch.float32)
    with pytest.raises(ValueError, match="'2' depends on how a batch is split"):
        train(model, data, loss_fn=nn.CrossEntropyLoss(), precision=name)


def test_weights_in_another_dtype_than_float32_are_refused() -> None:
    model = tiny_model(dtype=torch.float32)
    model[1].bfloat16()
    message = r"'1.norm.weight' is torch.bfloat16, but precision= .*call model.float\(\) first"
    with pytest.raises(ValueError, match=message):
        train(model, tiny_data(), loss_fn=nn.CrossEntropyLoss(), precision="bf16")


def test_weights_that_lose_small_updates_are_warned_of() -> None:
    model = tiny_model(dtype=torch.float32)
    model[1].bfloat16()
    model[1].norm.bias.requires_grad_(False)
    num = sum(p.dtype == torch.bfloat16 and p.requires_grad for p in model.parameters())
    begins = f"parameter '1.norm.weight' and {num - 1} others are torch.bfloat16, in which updates"
    assert about_low_weights(model).startswith(begins)
    assert about_low_weights(tiny_model(dtype=torch.float64)) == ""


@pytest.fixture
def usual_float32() -> Iterator[None]:
    """Leave the process's choice of how float32 matrices are multiplied as it was: none."""
    yield
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends.cuda, torch.backends.mkldnn):
        backend.matmul.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == "highest"


def choose_by_name() -> None:
    torch.set_float32_matmul_precision("high")


def choose_full() -> None:
    torch.set_float32_matmul_precision("highest")


def choose_by_switch() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def choose_by_backend() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def choose_nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("choose", "settings", "warns"),
    [
        (choose_nothing, {}, True),
        (choose_nothing, {"has_tf32": False}, False),
        (choose_nothing, {"device": "cpu"}, False),
        (choose_nothing, {"computes_in": torch.bfloat16}, False),
        (choose_nothing, {"dtype": torch.float64}, False),
        (choose_by_name, {}, False),
        (choose_full, {}, False),
        (choose_by_switch, {}, False),
        (choose_by_backend, {}, False),
    ],
)
def test_slow_products_on_a_gpu_that_has_tf32_are_told_of_unless_they_were_chosen(
    monkeypatch: pytest.MonkeyPatch,
    usual_float32: None,
    choose: Callable[[], None],
    settings: dict[str, Any],
    warns: bool,
) -> None:
    has_tf32 = settings.get("has_tf32", True)
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: has_tf32)
    choose()
    warning = about_full_float32(
        tiny_model(dtype=settings.get("dtype", torch.float32)),
        settings.get("computes_in"),
        torch.device(settings.get("device", "cuda")),
    )
    advice = 'precision="bf16", or call torch.set_float32_matmul_precision("high")'
    assert bool(warning) == warns == (advice in warning)


def test_a_run_warns_of_its_own_weights(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(dtype=torch.float32).bfloat16()
    with measuring(never):
        train(model, tiny_data(dtype=torch.bfloat16), loss_fn=nn.CrossEntropyLoss())
    assert sum("updates below 0.004 of a weight are lost" in text for text in caplog.messages) == 1


def test_the_model_is_verified_in_float64_whatever_the_precision() -> None:
    with tiny_trainer(tiny(), tiny_data(dtype=torch.float32), precision="fp16") as trainer:
        assert trainer.verify().dtype == "float64"


def test_it_begins_doubles_and_halves_as_torch_s_does() -> None:
    ours, torchs = LossScale(is_dynamic=True), torch.amp.GradScaler("cpu")
    assert ours.value == torchs.get_scale() == 2.0**16
    assert GROWTH_INTERVAL_STEPS == torchs.get_growth_interval()
    for _ in range(GROWTH_INTERVAL_STEPS - 1):
        ours.note_good_step()
    assert ours.value == 2.0**16
    ours.note_good_step()
    assert ours.value == torchs.get_growth_factor() * 2.0**16
    ours.shrink()
    assert ours.value == torchs.get_backoff_factor() * 2.0**17


def test_a_shrink_begins_the_count_of_good_steps_anew() -> None:
    scale = LossScale(is_dynamic=True)
    for _ in range(GROWTH_INTERVAL_STEPS - 1):
        scale.note_good_step()
    scale.shrink()
    scale.note_good_step()
    assert scale.value == 2.0**15


def test_it_explains_a_gradient_until_it_is_one_but_never_a_loss() -> None:
    scale = LossScale(is_dynamic=True)
    assert not scale.explains(math.nan, math.nan) and not scale.explains(1.0, 1.0)
    for _ in range(16):
        assert scale.explains(1.0, math.inf) and scale.explains(1.0, math.nan)
        scale.shrink()
    assert scale.value == 1.0 and not scale.explains(1.0, math.inf)


def test_one_that_is_not_dynamic_stays_one() -> None:
    scale = LossScale(is_dynamic=False)
    for _ in range(GROWTH_INTERVAL_STEPS):
        scale.note_good_step()
    assert scale.value == 1.0 and not scale.explains(1.0, math.inf)


@pytest.mark.parametrize("num_good", [0, 5, GROWTH_INTERVAL_STEPS - 1])
def test_a_state_goes_on_where_it_was(num_good: int) -> None:
    scale, other = LossScale(is_dynamic=True), LossScale(is_dynamic=True)
    scale.shrink()
    for _ in range(num_good):
        scale.note_good_step()
    other.load_state_dict(scale.state_dict())
    for _ in range(GROWTH_INTERVAL_STEPS - num_good):
        assert other.value == 2.0**15
        other.note_good_step()
    assert other.value == 2.0**16

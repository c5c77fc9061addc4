"""Prove that models which cannot be trained in parts are refused before anything starts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipetransformer import LayeredModel, Trainer
from pipetransformer.model import adapt
from tests.helpers.loops import TINY, loop, make_trainer, sgd, train
from tests.helpers.models import tiny_data, tiny_trainer
from tests.helpers.unusual import Layer, around


def counted(layer: Layer, hidden: Tensor) -> Tensor:
    """Divide by how often the layer was called."""
    layer.calls += 1
    return hidden / layer.calls


def warmed_up(layer: Layer, hidden: Tensor) -> Tensor:
    """Take part by and by, by how often the layer was called in training."""
    layer.calls += layer.training
    return hidden * min(1, layer.calls / 8)


def sized(layer: Layer, hidden: Tensor) -> Tensor:
    """Remember a size."""
    layer.width = hidden.shape[-1]
    return hidden


KEPT: dict[str, Tensor] = {}


def keep(layer: Layer, hidden: Tensor) -> Tensor:
    """Leave the hidden state for a later layer."""
    KEPT["hidden"] = hidden.detach()
    return hidden


def add_kept(layer: Layer, hidden: Tensor) -> Tensor:
    """Add what an earlier layer left."""
    kept = KEPT["hidden"]
    return hidden + (kept if len(kept) == len(hidden) else kept[: len(hidden)])


def remember(layer: Layer, hidden: Tensor) -> Tensor:
    """Add the first that came in this shape since another one did."""
    if layer.first.shape != hidden.shape:
        layer.first = hidden.detach()
    return hidden + layer.first


def average(layer: Layer, hidden: Tensor) -> Tensor:
    """Follow the mean of the hidden states, while gradients are on."""
    if layer.training and torch.is_grad_enabled():
        layer.ema.data.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
    return hidden + layer.ema


def averaging() -> nn.Module:
    layer = Layer(average)
    layer.register_buffer("ema", torch.zeros(8, dtype=torch.float64))
    return around(layer)


def holding() -> nn.Module:
    layer = Layer(lambda layer, hidden: hidden + F.linear(hidden, layer.kept[0]))
    layer.kept = [layer.linear.weight]
    return around(layer)


def aliased() -> nn.Module:
    model = around(nn.Linear(8, 8))
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    return model


def viewed() -> nn.Module:
    model = around(nn.Linear(8, 8))
    model[1].register_buffer("view", model[1].weight.data[:2])
    return model


def by_frequency() -> nn.Module:
    model = around(nn.Linear(8, 8))
    model[1].table = nn.Embedding(3, 8, scale_grad_by_freq=True)
    return model


def complex_valued() -> nn.Module:
    model = around(nn.Linear(8, 8))
    model[1].factor = nn.Parameter(torch.ones(8, dtype=torch.complex128))
    return model


def hooked_whole() -> nn.Module:
    model = around(nn.Linear(8, 8))
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def compiled_whole() -> nn.Module:
    model = around(nn.Linear(8, 8))
    model.compile(backend="eager")
    return model


def hooked_backward() -> nn.Module:
    model = around(nn.Linear(8, 8))
    model[1].register_full_backward_hook(lambda module, given, out: (given[0].clamp(-1, 1),))
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: around(Layer(counted, calls=0)), "'1' changes the number 'calls' of its Layer"),
        (lambda: around(Layer(warmed_up, calls=3)), "'1' changes the number 'calls' of its Layer"),
        (
            lambda: around(Layer(remember, first=torch.empty(0))),
            "'1' gives another output for the same input",
        ),
        (lambda: around(Layer(keep), Layer(add_kept)), "'2' gives another output .* beside the"),
        (
            lambda: around(Layer(lambda layer, hidden: hidden - hidden.mean(0))),
            "'1' depends on how a batch is split",
        ),
        (
            lambda: around(Layer(lambda layer, hidden: hidden + torch.randn_like(hidden))),
            "'1' draws random numbers in eval mode",
        ),
        (
            lambda: around(Layer(lambda layer, hidden: hidden.detach() + layer.linear.bias)),
            "'1' passes no gradient to those below it",
        ),
        (averaging, "'1' writes into its own '1.ema'"),
        (holding, "attribute 'kept' of '1' holds '1.linear.weight' beside"),
        (aliased, "'0.weight' and '1.weight' share memory"),
        (viewed, "'1.*' and '1.*' share memory"),
        (by_frequency, "'1.table' is an Embedding with scale_grad_by_freq=True"),
        (complex_valued, "parameter '1.factor' is complex"),
        (hooked_whole, "'Sequential' has forward hooks that would not run"),
        (hooked_backward, "'1' has backward hooks"),
        (compiled_whole, "'Sequential' was compiled in place, which would have no effect"),
    ],
)
def test_models_that_cannot_be_trained_in_parts_are_refused(
    build: Callable[[], nn.Module], message: str
) -> None:
    # All of these trained to the end, off by 2e-3 to 0.8 in the loss on one process with several
    # micro-batches, on two, or with frozen layers.
    model = build()
    before = {name: t.detach().clone() for name, t in model.state_dict().items()}
    with (
        pytest.raises(ValueError, match=message),
        make_trainer(replace(TINY, build=lambda: model)) as trainer,
    ):
        trainer.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert getattr(model[1], "calls", 3) in (0, 3)


def test_a_size_that_a_layer_keeps_is_no_count_of_its_calls() -> None:
    model = around(Layer(sized, width=0))
    with make_trainer(replace(TINY, build=lambda: model)) as trainer:
        trainer.step()


def test_a_list_that_holds_itself_is_looked_through_once() -> None:
    memo: list[Any] = [3]
    memo.append(memo)
    model = around(Layer(lambda layer, hidden: hidden, memo=memo))
    with make_trainer(replace(TINY, build=lambda: model)) as trainer:
        trainer.step()


def test_a_padding_mask_that_no_sublayer_takes_is_refused() -> None:
    """A misspelled one went through; nothing was cached, and the log advised to pad samples."""
    layered = adapt(around())
    layered.padding_mask = "mask"
    with pytest.raises(ValueError, match="padding_mask is 'mask'; give one of the sides"):
        Trainer(layered, tiny_data())


def test_sparse_gradients_are_refused_at_the_start() -> None:
    # They ended within the first step, as "Sparse CPU tensors do not have strides".
    model = nn.Sequential(nn.Embedding(5, 8, sparse=True), nn.Linear(8, 3))
    data = TensorDataset(torch.arange(5), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"'0' is an Embedding with sparse=True.*sparse=False"):
        tiny_trainer(model, data, optimizer=sgd)


def test_lazy_parameters_are_refused_at_the_start() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"'0.weight' is a UninitializedParameter.*one forward"):
        tiny_trainer(model)


class Holder:
    """A plain object."""

    def __init__(self, value: Any) -> None:
        self.value = value


def holding_elsewhere(how: str) -> nn.Module:
    """Use a weight that a layer has in a plain attribute."""
    layer = Layer(lambda layer, hidden: hidden)
    weight = layer.linear.weight
    act: Callable[[Layer, Tensor], Tensor] = lambda layer, hidden: hidden + layer.own(hidden)  # noqa: E731
    own: Any = {
        "private": [weight],
        "object": Holder(weight),
        "closure": lambda hidden: F.linear(hidden, weight),
        "partial": functools.partial(F.linear, weight=weight),
        "view": weight.t(),
    }[how]
    layer.act = act
    setattr(layer, "_own" if how == "private" else "own", own)
    return around(layer)


@pytest.mark.parametrize("how", ["private", "object", "closure", "partial", "view"])
def test_a_weight_that_a_layer_holds_elsewhere_is_refused(how: str) -> None:
    # It went on with what the weight was before it moved (weights off by 0.06).
    with pytest.raises(ValueError, match=r"own' of '1' holds '1.linear.weight' beside"):
        make_trainer(replace(TINY, build=lambda: holding_elsewhere(how)))


def counted_in_a_list(layer: Layer, hidden: Tensor) -> Tensor:
    layer.calls[0] += layer.training
    return hidden / (1 + layer.calls[0])


def counted_in_a_tensor(layer: Layer, hidden: Tensor) -> Tensor:
    """Count in place, and take part so slowly that two samples hardly show it."""
    if layer.training:
        layer.calls += 1
    return hidden * (1 + 1e-9 * layer.calls)


def counted_in_a_new_tensor(layer: Layer, hidden: Tensor) -> Tensor:
    layer.calls = layer.calls + int(layer.training)
    return hidden * (1 + 1e-9 * layer.calls)


def weighted_by_output(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    weights = output[:, 0].sigmoid()
    return (F.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"build": lambda: around(Layer(counted_in_a_list, calls=[0]))},
            "'1' changes the number 'calls' of its Layer in every call",
        ),
        (
            {"build": lambda: around(Layer(counted_in_a_tensor, calls=torch.zeros(())))},
            "'1' changes the tensor 'calls' of its Layer in every call",
        ),
        (
            {"build": lambda: around(Layer(counted_in_a_new_tensor, calls=torch.tensor(3)))},
            "'1' changes the tensor 'calls' of its Layer in every call",
        ),
        ({"loss_fn": weighted_by_output}, "the count of the loss's .* has a gradient"),
    ],
    ids=["list", "tensor", "new tensor", "count"],
)
def test_what_would_be_lost_without_a_word_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        with make_trainer(replace(TINY, **changes)) as trainer:
            trainer.step()


def keeping(layer: Layer, hidden: Tensor) -> Tensor:
    """Keep a result, as attention weights are, and all results, and the last two."""
    dropped = F.dropout(hidden, 0.5, layer.training)
    layer.last = dropped.detach()
    layer.history.append(layer.last)
    layer.recent = [*layer.recent[-1:], layer.last]
    return dropped


def test_results_that_a_layer_keeps_count_no_calls() -> None:
    model = around(Layer(keeping, history=[], recent=[], last=None))
    with make_trainer(replace(TINY, build=lambda: model)) as trainer:
        trainer.step()


class Rooted(nn.Module):
    """Hold a buffer beside a row of blocks, and multiply by it."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.blocks, self._counts = around(*(nn.Linear(8, 8) for _ in range(3))), counts
        self.register_buffer("calls", torch.full((), 3.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self._counts and self.training:
            self.calls = self.calls + 1
        # Too little for two samples to show it.
        x = x * (1 + 1e-12 * self.calls)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_buffer_of_a_recorded_model_that_counts_calls_is_refused_and_put_back() -> None:
    # It trained, and the buffer was 4 after any number of steps: the check's own call counted, and
    # the steps' calls were lost.
    model = Rooted(counts=True)
    with pytest.raises(ValueError, match="the forward writes into 'calls', and what it writes"):
        with make_trainer(replace(TINY, build=lambda: model)) as trainer:
            trainer.step()
    assert model.calls == 3


def scaled() -> nn.Module:
    torch.manual_seed(0)  # The same weights on every call.
    layer = Layer(lambda layer, hidden: hidden * layer.scale)
    layer.register_buffer("scale", torch.full((), 2.0, dtype=torch.float64))
    return around(layer)


def recorded() -> LayeredModel:
    torch.manual_seed(0)
    return adapt(Rooted(counts=False), lambda names: {"x": tiny_data()[:2][0]})


@pytest.mark.parametrize("build", [scaled, recorded])
def test_a_buffer_that_is_only_read_trains_as_in_a_plain_loop(
    build: Callable[[], nn.Module | LayeredModel],
) -> None:
    job = replace(TINY, build=build)
    ours, theirs = train(job), loop(job)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight)

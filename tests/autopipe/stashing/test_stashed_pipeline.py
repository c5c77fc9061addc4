"""Training without flushes computes what its formulas say, bit for bit, from as many versions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from autopipe import StashedPipeline, convert_deferred_batch_norm
from autopipe.stashing import StagePlace
from tests.helpers.marks import slow

BATCHES, SAMPLES = 7, 12
BALANCES = {1: [6], 2: [4, 2], 3: [2, 2, 2]}


def model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [layer for _ in range(3) for layer in (nn.Linear(5, 5), nn.Tanh())]
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        tuple(torch.randn(2, SAMPLES, 5, dtype=torch.float64, generator=generator))  # type: ignore[misc]
        for _ in range(BATCHES)
    ]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def delay(versions: str, stage: int, num_stages: int) -> int:
    """Return how many micro-batches a stage's weights are behind, as the papers' formulas say."""
    return num_stages - 1 - stage if versions == "stashed" else num_stages - 1


def by_hand(
    module: nn.Sequential,
    balance: list[int],
    chunks: int,
    versions: str,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> list[float]:
    """Train a module by delayed gradients in a plain loop, with every version ever kept."""
    ends = [sum(balance[: n + 1]) for n in range(len(balance))]
    stages = [module[a:b] for a, b in pairwise((0, *ends))]
    optimizers = [optimizer(list(stage.parameters())) for stage in stages]
    history = [[copy.deepcopy(stage) for stage in stages]]
    losses, number = [], 0
    for batch, (inputs, targets) in enumerate(batches()):
        total = 0.0
        for x, y in zip(inputs.chunk(chunks), targets.chunk(chunks), strict=True):
            used = []
            for s in range(len(stages)):
                if versions == "double_buffered":
                    version = max(0, batch - (len(stages) > 1))
                else:
                    done = max(0, number - delay(versions, s, len(stages)))
                    version = done // chunks
                used.append(copy.deepcopy(history[version][s]))
            value = x
            for stage in used:
                value = stage(value)
            loss = loss_fn(value, y) * (len(x) / SAMPLES)
            loss.backward()
            total += loss.item()
            for stage, old in zip(stages, used, strict=True):
                for p, q in zip(stage.parameters(), old.parameters(), strict=True):
                    p.grad = q.grad if p.grad is None else p.grad + q.grad
            number += 1
        for one in optimizers:
            one.step()
            one.zero_grad()
        history.append([copy.deepcopy(stage) for stage in stages])
        losses.append(total)
    return losses


def most_versions(name: str, place: StagePlace) -> int:
    """Return how many versions of its weights a stage holds at most, the present one included."""
    if name == "double_buffered":
        return min(2, place.num_stages)
    ahead = place.warm_up if name == "stashed" else place.num_stages - 1
    return 1 + -(-ahead // place.num_micro_batches)


@pytest.mark.parametrize("versions", ["stashed", "vertical_sync", "double_buffered"])
@pytest.mark.parametrize(("num_stages", "chunks"), [(1, 2), (2, 1), (2, 3), (3, 1), (3, 3)])
@pytest.mark.parametrize("optimizer", [momentum, slow(adam)])
def test_weights_are_those_of_delayed_gradients(
    versions: str, chunks: int, num_stages: int, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    if versions == "double_buffered" and chunks < num_stages - 1:
        pytest.skip("two versions do not suffice")
    expected, actual = model(), model()
    losses = by_hand(expected, BALANCES[num_stages], chunks, versions, optimizer)
    pipeline = StashedPipeline(
        actual,
        BALANCES[num_stages],
        optimizer=optimizer,
        devices=["cpu"] * num_stages,
        chunks=chunks,
        versions=versions,
    )
    assert pipeline.train_on(batches(), loss_fn) == pytest.approx(losses, rel=1e-12)
    for (name, p), q in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), name
    places = [StagePlace(stage, num_stages, chunks) for stage in range(num_stages)]
    assert pipeline.peak_versions == [most_versions(versions, place) for place in places]


def stashed(module: nn.Sequential, balance: list[int], **options: Any) -> StashedPipeline:
    devices = ["cpu"] * len(balance)
    return StashedPipeline(module, balance, optimizer=momentum, devices=devices, **options)


def test_a_loss_of_sum_and_count_is_divided_by_the_batch_s_count() -> None:
    def summed(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).square().sum(), output.numel()

    expected, actual = model(), model()
    losses = stashed(expected, [2, 4], chunks=3).train_on(batches(), loss_fn)
    assert stashed(actual, [2, 4], chunks=3).train_on(batches(), summed) == pytest.approx(losses)
    for p, q in zip(actual.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_a_data_loader_is_read_and_a_stage_may_train_nothing() -> None:
    x, y = zip(*batches(), strict=True)
    loader = DataLoader(TensorDataset(torch.cat(x), torch.cat(y)), batch_size=SAMPLES)
    module = model()
    before = copy.deepcopy(module.state_dict())
    module[0].requires_grad_(False)
    pipeline = stashed(module, [2, 4])
    assert pipeline.optimizers[0] is None
    losses = pipeline.train_on(loader, loss_fn)
    assert len(losses) == BATCHES
    assert losses[-1] != losses[0]
    after = module.state_dict()
    changed = [name for name in after if not after[name].equal(before[name])]
    assert changed == ["2.weight", "2.bias", "4.weight", "4.bias"]


def test_dropout_is_drawn_from_the_caller_s_generator() -> None:
    weights = []
    for _ in range(2):
        torch.manual_seed(11)
        module = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5)).double()
        stashed(module, [2, 1], chunks=2).train_on(batches(), loss_fn)
        weights.append(module[0].weight.detach().clone())
    assert weights[0].equal(weights[1])


def test_a_trace_shows_the_updates() -> None:
    pipeline = stashed(model(), [4, 2], chunks=2)
    with pipeline.trace() as trace:
        pipeline.train_on(batches(), loss_fn)
    assert sum(span.label.startswith("U") for span in trace.spans) == 2 * BATCHES
    assert trace.summary().schedule == "1f1b without flushes"


def test_what_fails_is_raised_and_leaves_no_thread() -> None:
    given = batches()
    given[3] = (given[3][0][:1], given[3][1][:1])
    pipeline = stashed(model(), [2, 4], chunks=3)
    with pytest.raises(ValueError, match="a batch of 1 samples cannot be cut into 3"):
        pipeline.train_on(given, loss_fn)
    assert not [t for t in threading.enumerate() if t.name.startswith("partition")]
    assert len(pipeline.train_on(batches(), loss_fn)) == BATCHES


def test_batches_that_end_too_early_are_told_of() -> None:
    class Longer(list[Any]):
        def __len__(self) -> int:
            return BATCHES + 2

    pipeline = StashedPipeline(model(), [3, 3], optimizer=adam, chunks=2)
    with pytest.raises(ValueError, match="the batches ended after 7, fewer than their length"):
        pipeline.train_on(Longer(batches()), loss_fn)


def test_versions_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="choose one of stashed, vertical_sync, double_buffered"):
        stashed(model(), [2, 4], versions="newest")
    with pytest.raises(ValueError, match="at least 2 micro-batches a batch on 3 stages"):
        stashed(model(), [2, 2, 2], versions="double_buffered")


class Checkpointed(nn.Module):
    """Repeat a layer's forward in its backward."""

    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_repeats_its_forward_does_so_with_the_same_weights(reentrant: bool) -> None:
    expected, actual = model(), model()
    layers = [Checkpointed(layer, reentrant) for layer in actual]
    layers[0] = actual[0]  # type: ignore[assignment]
    losses = stashed(expected, [2, 2, 2], chunks=2).train_on(batches(), loss_fn)
    found = stashed(nn.Sequential(*layers), [2, 2, 2], chunks=2).train_on(batches(), loss_fn)
    assert found == losses
    for p, q in zip(actual.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)


class Sneaky(nn.Module):
    """Use a weight that another module holds, too."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.hidden = layer, [layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.hidden[0] + self.layer.bias


def test_a_weight_that_is_used_past_its_module_is_refused() -> None:
    module = nn.Sequential(Sneaky(nn.Linear(5, 5)), nn.Linear(5, 5)).double()
    module[0].hidden = [module[0].layer.weight]  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="has used '0.0.layer.weight' past the module"):
        stashed(module, [1, 1]).train_on(batches(), loss_fn)


def test_what_stages_alone_cannot_train_is_refused() -> None:
    shared = nn.Linear(5, 5).double()
    with pytest.raises(ValueError, match="a trained parameter is in two partitions"):
        stashed(nn.Sequential(shared, nn.Sequential(nn.Tanh(), shared)), [1, 1])
    deferred = convert_deferred_batch_norm(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5)))
    with pytest.raises(ValueError, match="DeferredBatchNorm waits for the end of a batch"):
        stashed(deferred, [1, 1])
    pipeline = stashed(model(), [2, 4])
    with torch.inference_mode(), pytest.raises(RuntimeError, match="keeps no graph"):
        pipeline.train_on(batches(), loss_fn)

"""Prove that partitions that run at the same time draw random numbers that repeat."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopipe.engine.current_micro_batch import ForwardPass, is_recomputing
from autopipe.gpipe.module import GPipe
from autopipe.threads.randomness import Randomness, may_draw

CPU = torch.device("cpu")


def bernoulli(x: Tensor) -> Tensor:
    return torch.bernoulli(torch.full_like(x, 0.5))


def dropout(x: Tensor) -> Tensor:
    return nn.functional.dropout(torch.ones_like(x), 0.5)


def rrelu(x: Tensor) -> Tensor:
    return nn.functional.rrelu(-torch.ones_like(x), training=True)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape),
    "randint": lambda x: torch.randint(0, 1000, x.shape).float(),
    "randperm": lambda x: torch.randperm(x.numel()).view(x.shape).float(),
    "normal": lambda x: torch.normal(torch.zeros_like(x), 1.0),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "multinomial": lambda x: torch.multinomial(torch.ones(50), x.numel()).view(x.shape).float(),
    "bernoulli": bernoulli,
    "dropout": dropout,
    "rrelu": rrelu,
}


class Draw(nn.Module):
    """Add what one operation draws, and keep it apart for forwards and their repetitions."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.first: list[Tensor] = []
        self.repeated: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.draw(x)
        (self.repeated if is_recomputing() else self.first).append(drawn)
        return x + drawn


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("chunks", [1, 4])
def test_a_repetition_draws_what_its_forward_drew_whatever_the_operation(
    name: str, chunks: int
) -> None:
    layers = [Draw(DRAWS[name]) for _ in range(3)]
    ours = GPipe(nn.Sequential(*layers), [1, 1, 1], chunks=chunks, checkpoint="always")
    ours(torch.rand(8, 3, requires_grad=True)).sum().backward()
    for layer in layers:
        assert len(layer.first) == len(layer.repeated) == chunks
        for first, repeated in zip(layer.first, reversed(layer.repeated), strict=True):
            assert torch.equal(first, repeated)
    drawn = torch.cat([torch.cat(layer.first) for layer in layers])
    assert len(drawn.unique()) > 1


def test_a_seed_repeats_a_run_of_concurrent_partitions_and_another_changes_it() -> None:
    ours = GPipe(nn.Sequential(*[Draw(torch.rand_like) for _ in range(4)]), [1] * 4, chunks=8)

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [ours(torch.zeros(16, 5)) for _ in range(2)]

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])


def test_no_two_partitions_or_micro_batches_draw_the_same() -> None:
    layers = [Draw(torch.rand_like) for _ in range(3)]
    ours = GPipe(nn.Sequential(*layers), [1, 1, 1], chunks=4)
    ours(torch.zeros(8, 5))
    drawn = torch.cat([torch.cat(layer.first) for layer in layers]).flatten()
    assert len(drawn.unique()) == len(drawn) == 3 * 8 * 5


@pytest.mark.parametrize("balance", [[3], [1, 2]])
def test_where_partitions_take_turns_they_draw_as_the_plain_module_does(
    balance: list[int],
) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Draw(torch.rand_like))
    ours, x = GPipe(copy.deepcopy(layers), balance, checkpoint="always"), torch.rand(6, 4)
    torch.manual_seed(3)
    mine, after = ours(x), torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(mine, layers(x)) and torch.equal(after, torch.rand(1))
    state = torch.get_rng_state()
    mine.sum().backward()
    assert torch.equal(torch.get_rng_state(), state), "a repetition must not move the generator"


def test_deterministic_layers_do_not_touch_the_generator() -> None:
    ours = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Tanh()), [1, 2], chunks=3)
    state = torch.get_rng_state()
    ours(torch.ones(6, 3)).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(2, 2), False),
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.1).eval(), False),
        (nn.Dropout(0.0), False),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), False),
        (nn.TransformerEncoderLayer(4, 2, 8), True),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.2), True),
        (nn.RReLU(), True),
        (nn.FractionalMaxPool2d(2, output_size=2), True),
        (Draw(torch.rand_like).eval(), True),
    ],
)
def test_layers_that_may_draw_are_known(module: nn.Module, expected: bool) -> None:
    assert may_draw(nn.Sequential(module)) is expected


def test_an_operation_given_a_generator_keeps_it() -> None:
    own = torch.Generator().manual_seed(7)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    with Randomness(CPU, seed=1, draws=True).of(ForwardPass(0, 1)):
        assert torch.equal(torch.rand(3, generator=own), expected)


def test_random_numbers_of_python_are_not_managed() -> None:
    layer = Draw(lambda x: torch.full_like(x, random.random()))
    ours = GPipe(nn.Sequential(layer), [1], checkpoint="always")
    ours(torch.rand(2, 2, requires_grad=True)).sum().backward()
    assert not torch.equal(layer.first[0], layer.repeated[0])

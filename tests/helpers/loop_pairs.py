"""Run a loop plainly and by `attach`, in turn and step by step, and compare all that it does.

the plain loop    ours                                         verdict
a number          the same number, from rows                   served
a number          the same number, frozen blocks ran           equal
raises            raises, too                                  raises
a number          a ValueError of ours, of some words          refused
a number          another number, or another exception         fails
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch
from torch.utils._pytree import tree_flatten

from pipetransformer import attach
from tests.helpers.row_models import ROWS_RUN
from tests.helpers.row_stories import Loop, Plain, Story, assert_helpful

Verdict = Literal["served", "equal", "raises", "refused"]


class Side(Loop):
    """Be one of two loops, each of which has random numbers of its own.

    `cached` gives batches; `num_run` is how many samples frozen blocks ran in the last action.
    """

    def __init__(self, story: Story, make: Callable[[Any], Any]) -> None:
        super().__init__(story)
        self.batches: Iterator[Any] = iter(())
        self.batch: Any = None
        self.loss: Any = None
        self.num_run = 0
        torch.manual_seed(3)
        self.cached = make(self.model)
        self.random_state = torch.get_rng_state()

    def outcome(self, action: Callable[[Side], Any]) -> Any:
        """Return what an action comes to, or what it raises."""
        ROWS_RUN.clear()
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random_state)
            try:
                return action(self)
            except Exception as error:  # Any: it is judged.
                return error
            finally:
                self.random_state, self.num_run = torch.get_rng_state(), sum(ROWS_RUN)

    def update(self) -> None:
        if self.loss.isfinite():  # Of no rows it is NaN.
            self.loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad()


class Pair:
    """Hold both loops, and count verdicts of forwards in `seen`."""

    def __init__(
        self,
        story: Story,
        frozen: Sequence[int],
        seen: Counter[str],
        *,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.seen = seen
        self.plain = Side(story, lambda model: Plain(model, frozen))
        self.ours = Side(story, lambda model: attach(model, freeze=[*frozen], **(settings or {})))

    def do(self, action: Callable[[Side], Any]) -> Verdict:
        """Do something in both loops.

        Raises:
            AssertionError: ours comes to something else, and does not say so.
        """
        plain, ours = self.plain.outcome(action), self.ours.outcome(action)
        if not isinstance(plain, Exception) and not isinstance(ours, Exception):
            assert_alike(ours, plain)
            return "served" if self.plain.num_run > 0 == self.ours.num_run else "equal"
        # One of both may have left out a part.
        self.ours.random_state = self.plain.random_state
        for side in (self.plain, self.ours):
            side.waiting.clear()
        assert isinstance(ours, Exception), f"the plain loop raises {plain!r}, ours does not"
        if isinstance(plain, Exception):
            return "raises"
        if not isinstance(ours, ValueError):
            raise AssertionError(f"ours ends in {ours!r}, the plain loop does not") from ours
        assert_helpful(ours)
        return "refused"

    def forward(self, action: Callable[[Side], Any], *, is_due: bool) -> Verdict:
        """Do something that runs the model; rows surely can serve it where that is due."""
        verdict = self.do(action)
        self.seen.update(["forwards", verdict])
        if is_due and verdict != "raises":
            self.seen.update(["due", f"due and {verdict}"])
        return verdict

    def step(self, action: Callable[[Side], Any], *, is_due: bool) -> Verdict:
        """Train on the loss that a forward comes to, where both loops have one."""
        verdict = self.forward(action, is_due=is_due)
        if verdict in ("equal", "served"):
            assert self.do(Side.update) == "equal"
        return verdict

    def compare(self) -> None:
        """Compare every tensor, and the next random number."""
        expected = self.plain.tensors()
        assert self.ours.tensors().keys() == expected.keys()
        for name, own in self.ours.tensors().items():
            # The order of a sum changes the last digits.
            is_close = torch.allclose(own, expected[name], 1e-9, 1e-9, equal_nan=True)
            assert is_close, f"{name} is {own}, not {expected[name]}"
        assert self.do(lambda _: float(torch.rand(()))) == "equal"

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.ours.cached.close()


def assert_alike(own: Any, other: Any) -> None:
    """Compare numbers, and containers of them."""
    (ours, form), (others, expected) = tree_flatten(own), tree_flatten(other)
    assert form == expected, f"{own!r} in the place of {other!r}"
    for one, two in zip(ours, others, strict=True):
        if isinstance(two, torch.Tensor):
            assert torch.equal(one, two), f"{one} in the place of {two}"
        elif isinstance(two, float):
            assert one == pytest.approx(two, rel=1e-9, abs=1e-12, nan_ok=True)
        else:
            assert one == two, f"{one!r} in the place of {two!r}"

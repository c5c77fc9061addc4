"""Entries of a batch know their rows through all that moves them, and give nothing else away."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import accelerate.utils
import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils.data._utils.pin_memory import pin_memory
from torchvision.transforms import v2
from transformers import Trainer, TrainingArguments

from pipetransformer.loop.batches.batch_entry import BatchEntry, Mark

NUM, SHAPE = 4, (3, 8, 8)


def mark(number: int = 0) -> Mark:
    table = torch.stack([torch.full((NUM,), number), torch.arange(NUM)], dim=1)
    return Mark("x", {number: object()}, table)


def read(number: int = 0) -> BatchEntry:
    values = torch.randn(NUM, *SHAPE, generator=torch.Generator().manual_seed(number))
    return BatchEntry.read(mark(number), values)


def unread(number: int = 0) -> BatchEntry:
    return BatchEntry.unread(mark(number), SHAPE, torch.float32, torch.device("cpu"))


def rows(entry: Any) -> list[list[int]]:
    held = entry.mark()
    assert held is not None
    return held.table.tolist()


def mark_of(tensor: Any) -> Mark | None:
    return tensor.mark() if isinstance(tensor, BatchEntry) else None


MOVES: dict[str, Callable[[Tensor], Any]] = {
    "to a device": lambda x: x.to("cpu", non_blocking=True),
    "to the meta device": lambda x: x.to("meta"),
    "to a dtype": lambda x: x.to(torch.bfloat16),
    "to another's": lambda x: x.to(torch.zeros(1, dtype=torch.float64)),
    "half": lambda x: x.half(),
    "double": lambda x: x.double(),
    "cpu": lambda x: x.cpu(),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "clone": lambda x: torch.clone(x),
    "full slice": lambda x: x[:, :],
    "accelerate": lambda x: accelerate.utils.send_to_device({"x": x}, torch.device("cpu"))["x"],
    "Lightning": lambda x: move_data_to_device([x], torch.device("cpu"))[0],
}


@pytest.mark.parametrize("make", [read, unread])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_what_moves_a_batch_keeps_its_rows(
    move: Callable[[Tensor], Any], make: Callable[[], BatchEntry]
) -> None:
    entry, plainly = make(), torch.zeros(NUM, *SHAPE)
    moved, expected = move(entry), move(plainly)
    assert isinstance(moved, BatchEntry)
    assert rows(moved) == rows(entry)
    assert (moved.shape, moved.dtype, moved.device) == (
        expected.shape, expected.dtype, expected.device,
    )  # fmt: skip


TAKES: dict[str, tuple[Callable[[Tensor], Any], list[int]]] = {
    "slice": (lambda x: x[1:3], [1, 2]),
    "step": (lambda x: x[::2, ...], [0, 2]),
    "list": (lambda x: x[[3, 0]], [3, 0]),
    "permutation": (lambda x: x[torch.tensor([2, 0, 1, 3])], [2, 0, 1, 3]),
    "mask": (lambda x: x[torch.tensor([True, False, False, True])], [0, 3]),
    "chunk": (lambda x: x.chunk(2)[1], [2, 3]),
    "split": (lambda x: torch.split(x, [1, 3])[1], [1, 2, 3]),
    "narrow": (lambda x: x.narrow(0, 1, 2), [1, 2]),
    "index_select": (lambda x: torch.index_select(x, 0, torch.tensor([2, 2])), [2, 2]),
    "repeat": (lambda x: x.repeat_interleave(2, dim=0), [0, 0, 1, 1, 2, 2, 3, 3]),
    "cat": (lambda x: torch.cat([x[2:], x[:1]]), [2, 3, 0]),
}


@pytest.mark.parametrize("make", [read, unread])
@pytest.mark.parametrize(("take", "expected"), TAKES.values(), ids=TAKES)
def test_rows_that_are_taken_are_known(
    take: Callable[[Tensor], Any], expected: list[int], make: Callable[[], BatchEntry]
) -> None:
    entry = make()
    taken = take(entry)
    assert rows(taken) == [[0, place] for place in expected]
    assert len(taken) == len(expected)
    assert taken.shape[1:] == SHAPE
    if (values := entry.content()) is not None:
        assert torch.equal(taken.content(), values[expected])


def test_batches_that_are_joined_keep_theirs_apart() -> None:
    joined = torch.cat([unread(0)[1:2], unread(5)[3:]])
    assert rows(joined) == [[0, 1], [5, 3]]


def test_a_batch_without_rows_that_is_joined_ends_them() -> None:
    first = BatchEntry.read(Mark("x", {}, torch.full((NUM, 2), -1)), torch.zeros(NUM, *SHAPE))
    assert type(torch.cat([first, read()])) is Tensor
    assert torch.cat([first, first]).mark() is not None  # It says its name still.


def test_rows_that_are_taken_along_a_negative_dimension_are_right() -> None:
    for part in read().split(1, dim=-4):
        assert part.shape == (1, *SHAPE) and mark_of(part) is None


COMPUTES: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda x: x.transpose(2, 3),
    "channel swap": lambda x: x[:, [2, 1, 0]],
    "flip": lambda x: x.flip(0),
    "round": torch.round,
    "relu": torch.relu,
    "abs": abs,
    "sort": lambda x: x.sort().values,
    "patches": lambda x: nn.functional.unfold(x, 4),
    "view": lambda x: x.view(NUM, -1),
    "greater": lambda x: x > 0.5,
    "nan_to_num": torch.nan_to_num,
    "uint8": lambda x: x.to(torch.uint8),
    "long": lambda x: x.long(),
    "fmax": lambda x: torch.fmax(x, torch.zeros(())),
    "where": lambda x: torch.where(torch.ones(()) > 0, x, 0.0),
    "one_hot": lambda x: nn.functional.one_hot(x.long()),
    "mean": lambda x: x.mean(),
    "item": lambda x: x[0],
    "iteration": list,
    "bool": lambda x: bool(x[:1].sum()),
    "equal": lambda x: torch.equal(x, x),
    "zeros_like": torch.zeros_like,
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "data": lambda x: x.data,
    "tolist": lambda x: x.tolist(),
    "storage": lambda x: x.untyped_storage(),
    "gradient": lambda x: x.requires_grad_(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "stack": lambda x: torch.stack([x, x]),
    "cat of channels": lambda x: torch.cat([x, x], dim=1),
    "cat with another's": lambda x: torch.cat([x, torch.zeros(1, *SHAPE)]),
    "out": lambda x: torch.add(torch.ones(NUM, *SHAPE), 1, out=x),
    "foreach": lambda x: torch._foreach_add([x], 1.0),
    "past Python": lambda x: torch._C.TensorBase.add(x, 1),
    "as another kind": lambda x: x.as_subclass(Tensor),
    "in place": lambda x: x.add_(1),
    "a hole": lambda x: x.__setitem__((slice(None), 0), 0.0),
    "convolution": lambda x: nn.Conv2d(3, 2, 1)(x),
    "MixUp": lambda x: v2.MixUp(num_classes=5)(x, torch.arange(NUM)),
    "CutMix": lambda x: v2.CutMix(num_classes=5)(x, torch.arange(NUM)),
    "Normalize": lambda x: v2.Normalize([0.5] * 3, [0.5] * 3)(x),
    "torchvision's flip": lambda x: v2.RandomHorizontalFlip(1.0)(x),
}


@pytest.mark.parametrize("compute", COMPUTES.values(), ids=COMPUTES)
def test_nothing_is_computed_of_what_was_not_read(compute: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"was asked of 'x', which was not read.*reads=\('x',\)"):
        compute(unread())


@pytest.mark.parametrize("compute", COMPUTES.values(), ids=COMPUTES)
def test_what_is_computed_of_what_was_read_is_plain(compute: Callable[[Any], Any]) -> None:
    def outcome(entry: Any) -> Any:
        torch.manual_seed(0)
        try:
            return compute(entry)
        except (RuntimeError, ValueError, TypeError) as error:
            return type(error)

    entry = read()
    plainly = entry.content()
    assert plainly is not None
    expected, found = outcome(plainly.clone()), outcome(entry)
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
        # A view is followed, but has no rows; a cast has a dtype that no row is of.
        assert (
            not isinstance(found, BatchEntry) or found.mark() is None or found.dtype != entry.dtype
        )
    else:
        assert type(found) is type(expected)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda x: x.mul_(2),
    "an item": lambda x: x.__setitem__(0, 1.0),
    "a view": lambda x: x.view(-1).zero_(),
    "a part's view": lambda x: x[1:].zero_(),
    "numpy": lambda x: x.numpy().fill(1),
    "asarray": lambda x: np.asarray(x).fill(1),
    "data": lambda x: x.data.zero_(),
    "storage": lambda x: x.untyped_storage().fill_(1),
    "out": lambda x: torch.add(torch.ones(NUM, *SHAPE), 1, out=x),
    "a gradient": lambda x: x.requires_grad_(),
    "a view's array": lambda x: x.view(-1).numpy().fill(1),
    "a row's data": lambda x: x[0].data.zero_(),
    "a view's view": lambda x: x.permute(0, 2, 3, 1)[:, 0].numpy().fill(1),
    "other memory": lambda x: x.set_(torch.ones(NUM, *SHAPE)),
    "its memory for another": lambda x: torch.empty(0).set_(x).fill_(1),
    "a shallow copy": lambda x: copy.copy(x).numpy().fill(1),
    "past the rules": lambda x: Tensor._make_subclass(Tensor, x).fill_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_values_have_no_rows(change: Callable[[Any], Any]) -> None:
    entry = read()
    part, copied = entry[:2], entry.to(torch.float64)
    change(entry)
    assert entry.mark() is None
    assert part.mark() is None
    assert mark_of(entry.to(torch.float64)) is None
    assert mark_of(entry[:2]) is None
    # A copy has its own memory; it is enough that it is right.
    assert copied.mark() is None or torch.equal(copied.content(), read().content().double())


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_numbers_that_were_rounded_on_the_way_have_no_rows(narrow: torch.dtype) -> None:
    assert rows(read().to(narrow)) == rows(read())
    assert type(read().to(narrow).float()) is Tensor
    with pytest.raises(ValueError, match="'float' was asked of 'x', which was not read"):
        unread().to(narrow).float()
    assert rows(unread().double()) == rows(unread())


def test_a_copy_of_what_was_read_is_a_plain_tensor() -> None:
    entry = read()
    for one in (copy.deepcopy(entry), pickle.loads(pickle.dumps(entry))):
        assert type(one) is Tensor
        assert torch.equal(one, entry.content())


@pytest.mark.parametrize("make", [read, unread])
def test_an_entry_says_what_it_is_like(make: Callable[[], BatchEntry]) -> None:
    entry, plainly = make(), torch.zeros(NUM, *SHAPE)
    for ask in (
        lambda x: x.shape, lambda x: x.size(1), len, lambda x: x.ndim, lambda x: x.dim(),
        lambda x: x.numel(), lambda x: x.dtype, lambda x: x.device, lambda x: x.is_cuda,
        lambda x: x.is_cpu, lambda x: x.is_floating_point(), lambda x: x.requires_grad,
        lambda x: x.element_size(), lambda x: x.is_contiguous(), lambda x: x.get_device(),
    ):  # fmt: skip
        assert ask(entry) == ask(plainly)
    assert "4, 3, 8, 8" in repr(entry) or "tensor(" in repr(entry)


def test_transformers_trainer_moves_entries(tmp_path: Any) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    prepared = Trainer(nn.Linear(2, 2), arguments)._prepare_inputs({"x": unread()})
    assert rows(prepared["x"]) == rows(unread())


def test_a_loader_that_pins_leaves_entries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor, device=None: tensor.clone())
    assert rows(pin_memory({"x": unread()})["x"]) == rows(unread())

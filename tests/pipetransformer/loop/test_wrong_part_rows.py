"""Rows of a part never change a training: it goes on as by hand, is not cached, or is refused."""

from __future__ import annotations

import copy
import logging
import re
from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from pipetransformer import attach
from tests.helpers.marks import slow

_NUM, _EPOCHS = 12, 3
_Answer = namedtuple("_Answer", ["hidden", "none"])


class Plain(nn.Module):
    """A head on a tower; others do something around it."""

    def __init__(self, tower: nn.Module | None = None) -> None:
        super().__init__()
        self.trained, self.head = nn.Linear(48, 48), nn.Linear(8, 5)
        own = nn.Sequential(nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 8))
        self.tower, self.drop = own if tower is None else tower, nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.tower(x.flatten(1)))
        return answer


def _model(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    kind = type("Changed", (Plain,), {"forward": forward})
    return lambda: kind()


class Returning(nn.Module):
    """Return something else than a tensor of numbers."""

    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(48, 8), of

    def forward(self, x: Tensor) -> Any:
        return self.of(self.linear(x))


def _returning(
    of: Callable[[Tensor], Any], use: Callable[[Any], Tensor]
) -> Callable[[], nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        answer: Tensor = self.head(use(self.tower(x.flatten(1))))
        return answer

    kind = type("Using", (Plain,), {"forward": forward})
    return lambda: kind(Returning(of))


@dataclass
class Holder:
    hidden: Tensor


# What trains below a part, and hands it no gradient.
def _no_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        below = self.trained(x.flatten(1))
    return self.head(self.tower(below)) + self.trained(x.flatten(1))[:, :5]


def _no_grad_around(self: Any, x: Tensor) -> Tensor:
    below = self.trained(x.flatten(1))
    with torch.no_grad():
        hidden = self.tower(below)
    return self.head(hidden) + below[:, :5]


def _detached(self: Any, x: Tensor) -> Tensor:
    below = self.trained(x.flatten(1))
    return self.head(self.tower(below.detach())) + below[:, :5]


def _counted(self: Any, x: Tensor) -> Tensor:
    below = self.trained(x.flatten(1))
    return self.head(self.tower(F.one_hot(below.argmax(1), 48).float())) + below[:, :5]


def _beside(self: Any, x: Tensor) -> Tensor:
    beside = self.drop(self.trained(x.flatten(1)))  # Draws before the part, and trains.
    return self.head(self.tower(x.flatten(1))) + beside[:, :5]


def _drawing(self: Any, x: Tensor) -> Tensor:
    return self.head(self.drop(self.tower(x.flatten(1))))


def _image_in_training(self: Any, x: Tensor) -> Tensor:
    answer = self.head(self.tower(x.flatten(1)))
    return answer + x.mean((1, 2, 3))[:, None] * self.head.bias if self.training else answer


def _head_needs_gradients(self: Any, x: Tensor) -> Tensor:
    hidden = self.tower(x.flatten(1).requires_grad_())
    return checkpoint(lambda h: self.head(h).tanh(), hidden, use_reentrant=True)


def _checkpointed(self: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda v: self.head(self.tower(v.flatten(1))).tanh(), x, use_reentrant=False)


def _own_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = self.tower(x.flatten(1))
    return self.head(hidden.float())


def _in_place(self: Any, x: Tensor) -> Tensor:
    return self.head(self.tower(x.flatten(1)).mul_(2))


def _twice(self: Any, x: Tensor) -> Tensor:
    values = x.flatten(1)
    hidden = self.tower(values)
    return self.head(hidden + self.tower(values.flip(1)) if vars(self).get("twice") else hidden)


def _not_at_all(self: Any, x: Tensor) -> Tensor:
    values = x.flatten(1)
    return self.head(values[:, :8] if vars(self).get("skips") else self.tower(values))


class Gated(Plain):
    """Write into one of two equal answers, of which the other is behind a gate of zero."""

    def __init__(self) -> None:
        super().__init__(Returning(lambda hidden: (hidden, hidden)))
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.tower(x.flatten(1))
        answer: Tensor = self.head(one.mul_(2)) + self.gate * self.head(other)
        return answer


class Notes:
    """Keep what a module within the tower returned, as a hook of the model's own."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def __call__(self, _: nn.Module, _args: object, answer: Tensor) -> None:
        self.seen["last"] = answer


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()
        self.tower[1].register_forward_hook(self.notes)

    def forward(self, x: Tensor) -> Tensor:
        self.tower(x.flatten(1))
        answer: Tensor = self.head(self.notes.seen["last"][:, :8])
        return answer


class Labelled(Plain):
    """Its part is given labels, and is not called without."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(5, 8))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.trained(x.flatten(1))[:, :8]
        answer: Tensor = self.head(hidden if labels is None else hidden * self.tower(labels))
        return answer


def _weight_norm() -> nn.Module:
    model = Plain(nn.Linear(48, 8))
    nn.utils.spectral_norm(model.tower)
    return model


def _hooked_itself() -> nn.Module:
    model = _returning(lambda h: (h, h * 2), lambda answer: answer)()
    model.tower.register_forward_hook(lambda _m, _i, answer: answer[0])
    return model


def _compiled() -> nn.Module:
    return Plain(torch.compile(nn.Sequential(nn.Linear(48, 8), nn.ReLU()), backend="eager"))


@dataclass(frozen=True)
class Run:
    losses: list[float]
    weights: list[Tensor]
    hits: list[int] = field(default_factory=list)


_Loss = Callable[[nn.Module, Any], Tensor]


def _usual(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _with_labels(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"], labels=batch["labels"]), batch["y"])


def _run(
    build: Callable[[], nn.Module],
    *,
    by_hand: bool,
    loss: _Loss = _usual,
    batch_size: int = 4,
    begin: Callable[[nn.Module, int], None] = lambda _model, _epoch: None,
    **settings: Any,
) -> Run:
    torch.manual_seed(0)
    model, labels = build(), torch.arange(_NUM) % 5
    samples = [{"x": torch.randn(3, 4, 4), "y": one, "labels": one} for one in labels]
    loader = DataLoader(samples, batch_size=batch_size, shuffle=True)
    trained = [p for name, p in model.named_parameters() if not name.startswith("tower.")]
    optimizer, losses, hits = torch.optim.SGD(trained, lr=0.1), list[float](), list[int]()
    cached = None if by_hand else attach(model, cache=True, parts=["tower"], **settings)
    if by_hand:
        model.get_submodule("tower").requires_grad_(False)

    def batches() -> Iterable[Any]:
        return loader if cached is None else cached.epoch(loader)

    torch.manual_seed(1)
    for epoch in range(_EPOCHS):
        model.train()
        if by_hand:
            model.get_submodule("tower").eval()
        begin(model, epoch)
        for batch in batches():
            optimizer.zero_grad()
            found = loss(model, batch)
            found.backward()
            optimizer.step()
            losses.append(found.item())
        hits.append(0 if cached is None else cached.stats.hits)
    if cached is not None:
        cached.close()
    return Run(losses, [p.detach() for p in model.parameters()], hits)


def _is_as_by_hand(
    build: Callable[[], nn.Module], *, rounding: float = 0.0, **how: Any
) -> list[int]:
    loop_only = {n: how[n] for n in ("loss", "begin", "batch_size") if n in how}
    plain, ours = _run(build, by_hand=True, **loop_only), _run(build, by_hand=False, **how)
    for one, other in zip(ours.weights, plain.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)
    assert ours.losses == pytest.approx(plain.losses, rel=rounding, abs=rounding)
    return ours.hits


_SERVED: dict[str, Callable[[], nn.Module]] = {
    "trains and draws beside": _model(_beside),
    "draws above": _model(_drawing),
    "image in training": _model(_image_in_training),
    "checkpoint above needs gradients": _model(_head_needs_gradients),
    "autocast of its own": _model(_own_autocast),
    "written in place": _model(_in_place),
    "weight of a norm": _weight_norm,
    "hook that changes the structure": _hooked_itself,
    "compiled": _compiled,
    "bools before floats": _returning(
        lambda h: (h[:, :3] > 0, h), lambda a: a[1] + a[0].float().sum(1, keepdim=True)
    ),
    "complex, bfloat16, integers, a number a sample": _returning(
        lambda h: (torch.complex(h, h), h.bfloat16(), (h * 10).long(), h[:, 0]),
        lambda a: a[0].real + a[1].float() + a[2].float() * 0.1 + a[3][:, None],
    ),
    "a single complex": _returning(lambda h: torch.complex(h, h), lambda a: a.real),
    "nothing in one": _returning(lambda h: (h, h[:, :0]), lambda a: a[0]),
    "a named tuple": _returning(lambda h: _Answer(h, None), lambda a: a.hidden),
    "dicts and lists": _returning(
        lambda h: {"a": [h, (h * 2, None)], "n": 3}, lambda a: a["a"][0] + a["a"][1][0] * a["n"]
    ),
}


@pytest.mark.parametrize("name", _SERVED)
def test_rows_of_a_part_change_nothing(name: str) -> None:
    assert _is_as_by_hand(_SERVED[name])[-1] == _NUM


_SERVED_SINGLY = (
    "checkpoint above needs gradients",
    "trains and draws beside",
    "bools before floats",
)


@pytest.mark.parametrize("name", [n if n in _SERVED_SINGLY else slow(n) for n in _SERVED])
def test_a_batch_of_one_sample_has_rows_of_a_part(name: str) -> None:
    # Rows are made four at a time, so their sums have another order: parts in bfloat16, too.
    assert _is_as_by_hand(_SERVED[name], batch_size=1, rounding=1e-2)[-1] == _NUM


# Without a look each of these trained on stale or wrong rows, and nothing was said.
_NOT_CACHED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no_grad below": (_model(_no_grad), "computed from 'trained.weight' and 1 more, which trains"),
    "no_grad around": (_model(_no_grad_around), "which trains"),
    "detached below": (_model(_detached), "which trains"),
    "argmax below": (_model(_counted), "which trains"),
    "hook within": (Hooked, "a hook on '1' within waits for calls"),
    "aliases, one of them written": (
        _returning(lambda h: (h, h), lambda a: (a[0].mul_(2), a[1])[1]), "from rows the model"
    ),
    "aliases behind a gate of zero": (Gated, "from rows the model"),
    "length of the batch": (
        _returning(lambda h: (h, len(h)), lambda a: a[0] * a[1]), "3 for some samples"
    ),
    "no entry a sample": (
        _returning(lambda h: (h, h.new_ones(2, 8)), lambda a: a[0] * a[1].sum(0)),
        "shape \\(2, 8\\) for 3 samples",
    ),
    "an unknown class": (
        _returning(lambda h: (h, Holder(h)), lambda a: a[0] + a[1].hidden), "returns a Holder"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _NOT_CACHED)
def test_a_part_is_computed_where_rows_would_be_wrong(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, reason = _NOT_CACHED[name]
    assert not any(_is_as_by_hand(build))
    (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert re.search(f"no cache of 'tower' of .*{reason}", message)


def test_a_part_that_is_given_labels_has_rows() -> None:
    assert _is_as_by_hand(Labelled, loss=_with_labels)[-1] == _NUM


def _set(name: str, model: nn.Module, epoch: int) -> None:
    setattr(model, name, epoch == 2)


def test_a_part_that_is_called_twice_later_has_no_rows_then() -> None:
    hits = _is_as_by_hand(_model(_twice), begin=partial(_set, "twice"))
    assert hits[1] == _NUM and hits[2] < _NUM


def test_a_part_that_is_left_out_later_is_refused() -> None:
    with pytest.raises((ValueError, RuntimeError), match="has left out 'tower'"):
        _run(_model(_not_at_all), by_hand=False, begin=partial(_set, "skips"))


def test_a_part_that_is_left_out_later_needs_what_is_computed_instead() -> None:
    epochs = list[int]()

    def forward(self: Any, x: Tensor) -> Tensor:
        values = x.flatten(1)
        is_last = epochs[-1] == _EPOCHS - 1
        return self.head(values[:, :8].nan_to_num() if is_last else self.tower(values))

    def begin(_: nn.Module, epoch: int) -> None:
        epochs.append(epoch)

    with pytest.raises(ValueError, match=r"leaves out 'tower'.* give reads=\('x',\)"):
        _run(_model(forward), by_hand=False, begin=begin)
    assert _is_as_by_hand(_model(forward), begin=begin, reads=("x",))[1] == _NUM


def test_a_checkpoint_around_a_part_needs_what_it_runs_again_on() -> None:
    with pytest.raises(ValueError, match=r"give reads=\('x',\)"):
        _run(_model(_checkpointed), by_hand=False)
    assert _is_as_by_hand(_model(_checkpointed), reads=("x",))[-1] == _NUM


def test_the_hook_of_a_loop_within_a_part_goes_on_being_called() -> None:
    def run(by_hand: bool) -> Run:
        notes = Notes()

        def begin(model: Any, epoch: int) -> None:
            if epoch == 2:  # Behind an epoch that has read rows.
                model.tower[1].register_forward_hook(notes)

        def loss(model: Any, batch: Any) -> Tensor:
            answer = model(batch["x"])
            more = notes.seen["last"].mean() if notes.seen else 0.0
            return F.cross_entropy(answer + model.head.bias * more, batch["y"])

        return _run(Plain, by_hand=by_hand, begin=begin, loss=loss)

    plain, ours = run(True), run(False)
    assert ours.losses == plain.losses and ours.hits[1] == _NUM


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 8)

    def forward(self, x: Tensor, return_dict: bool) -> Any:
        hidden = self.linear(x.flatten(1))
        return {"hidden": hidden} if return_dict else (hidden, hidden * 2)


class Telling(Plain):
    def __init__(self) -> None:
        super().__init__(Told())

    def forward(self, x: Tensor, return_dict: bool = True) -> Tensor:
        told = self.tower(x, return_dict=return_dict)
        answer: Tensor = self.head(told["hidden"] if return_dict else told[1])
        return answer


def test_a_part_that_is_told_of_return_dict_runs_where_that_is_another() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        is_first = 0 in batch["labels"].tolist()
        return F.cross_entropy(model(batch["x"], return_dict=is_first), batch["y"])

    assert _is_as_by_hand(Telling, loss=loss)[-1] == _NUM


def test_a_part_with_two_names_has_either() -> None:
    model = Plain()
    model.other = model.tower
    attach(model, cache=True, parts=["other"]).close()


def test_rows_of_several_tensors_are_not_rounded() -> None:
    build = _returning(lambda h: (h, h), lambda answer: answer[0])
    with pytest.raises(ValueError, match="rounds rows of a single tensor"):
        _run(build, by_hand=False, cache_dtype="bfloat16")


def test_rounded_rows_do_where_the_model_returns_a_dict() -> None:
    build = type("Dict", (Plain,), {"forward": lambda self, x: {"a": Plain.forward(self, x)}})
    run = _run(
        build,
        by_hand=False,
        loss=lambda model, batch: F.cross_entropy(model(batch["x"])["a"], batch["y"]),
        cache_dtype="bfloat16",
    )
    assert run.hits[-1] == _NUM


class Tripled(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 3)


def test_a_batch_of_another_attach_has_no_rows_of_this_one() -> None:
    # Both have the same weights, and so had the same stamps; and their samples are others.
    torch.manual_seed(0)
    models = [Plain(), Tripled()]
    models[1].load_state_dict(models[0].state_dict())
    plain = [copy.deepcopy(model).eval() for model in models]
    inputs = [torch.randn(_NUM, 3, 4, 4) for _ in models]
    loaders = [
        DataLoader([{"x": x, "place": i} for i, x in enumerate(own)], batch_size=4)
        for own in inputs
    ]
    attached = [attach(model, cache=True, parts=["tower"]) for model in models]
    for epoch in range(6):
        turn = epoch % 2
        for batch in attached[turn].epoch(loaders[turn]):
            images = inputs[turn][batch["place"]]
            for place, (model, own) in enumerate(zip(models, plain, strict=True)):
                if place == turn or epoch > 1:  # Each has begun by then.
                    assert torch.equal(model.eval()(batch["x"]), own(images))
    assert [one.stats.hits for one in attached] == [_NUM, _NUM]
    for one in attached:
        one.close()

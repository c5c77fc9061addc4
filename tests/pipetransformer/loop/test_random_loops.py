"""Random loops with `attach`: each step's numbers are those of the same loop without it.

property            what is random                          what stays
changed batches     what a step does to its batch           a model, the loop
calls               arguments of a forward, and the first   the loop
edited models       what is done to a model before a step   the loop
loops               data, order, epochs, evaluations        the model
edited data         the same, and samples between epochs    the model

A step may be refused by an error of ours. What surely can be served must be served.
"""

from __future__ import annotations

import inspect
from collections import Counter, UserDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, seed
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset
from transformers import BatchEncoding

from tests.helpers import loop_changes as lines
from tests.helpers import row_models as rows
from tests.helpers.loop_changes import NAMES, Change
from tests.helpers.loop_pairs import Pair, Side
from tests.helpers.odd_cases import round_of
from tests.helpers.row_models import LENGTH, NUM_SAMPLES, WIDTH, Items, Model, Named
from tests.helpers.row_stories import Story, adapt

ROUND = round_of(10, shrinks_if="ROW_SHRINK")
BATCHES_AN_EPOCH = 3
DEPTHS = st.integers(1, 3)

Case = dict[str, Any]
Seen = Counter[str]


def next_batch(side: Side) -> None:
    """Take the next batch, of the next epoch if need be."""
    side.batch = next(side.batches, None)
    if side.batch is None:
        side.batches = side.cached.epoch(side.loader)
        side.batch = next(side.batches)


# What a step does to its batch.

BATCHES: dict[str, tuple[Any, Any]] = {
    "tuples of texts": (Model, rows.texts),
    "texts by name": (rows.TextModel, rows.labelled_texts),
    "tuples of three": (Model, lambda: Items(*rows.columns("ids", "labels", "others"))),
    "tuples of images": (rows.picture_model(), rows.images),
    "images by name": (partial(rows.Pictures, embed=rows.patches), rows.labelled_images),
}
GROUPS: dict[str, tuple[Any, ...]] = {
    "moves": ("each", lines.MOVES),
    "rows": ("each", lines.ROWS),
    "unusual rows": ("each", lines.UNUSUAL_ROWS),
    "cuts": ("cuts", lines.CUTS),
    "computes": ("input", lines.COMPUTES),
    "looks": ("look", lines.LOOKS),
    "batches": ("batch", lines.OF_BATCHES),
    "writes": ("look", lines.VIEWS, lines.MEMORIES, lines.WRITES),
}
USUAL = ("moves", "rows", "cuts") * 4
"""Most changes keep rows, so that rows are used where a change beside them does harm."""


@st.composite
def changes(draw: st.DrawFn) -> Change:
    group = draw(st.sampled_from((*USUAL, *GROUPS)))
    of, *tables = GROUPS[group]
    texts = tuple(draw(st.sampled_from(table)) for table in tables)
    return Change(of, texts, draw(st.integers(0, 7)))


STEPS = st.lists(st.lists(changes(), max_size=3), min_size=7, max_size=7)
CHANGED_BATCHES = st.fixed_dictionaries(
    {"kind": st.sampled_from([*BATCHES]), "depth": DEPTHS, "steps": STEPS}
)


def loss_of_parts(sequence: list[Change], side: Side) -> list[Any]:
    batch = side.batch
    named = batch.items() if isinstance(batch, dict) else zip("xyz", batch, strict=False)
    short = {"input_ids": "x", "pixel_values": "x", "attention_mask": "mask", "labels": "y"}
    side.seen.clear()
    parts = [{short.get(name, name): entry for name, entry in named}]
    for change in sequence:
        parts = [part for one in parts for part in change.batches(side, one)]
    losses = []
    for part in parts:
        logits = side.model(*(part[name] for name in ("x", "mask") if name in part))
        losses.append(F.cross_entropy(logits, part["y"]))
    side.loss = torch.stack(losses).sum()
    return [side.loss.item(), *side.seen]


def judge_changes(case: Case, seen: Seen) -> None:
    with Pair(Story(*BATCHES[case["kind"]]), (case["depth"],), seen) as pair:
        for step, sequence in enumerate(case["steps"]):
            if pair.do(next_batch) == "refused":
                return
            has_begun = step >= BATCHES_AN_EPOCH  # The first forward may have to teach.
            is_due = has_begun and all(change.must_keep_rows for change in sequence)
            pair.step(partial(loss_of_parts, sequence), is_due=is_due)
        pair.compare()


# Arguments of a forward.


class Flagged(Model):
    """Take what transformers' models take, and flags that act below and above the blocks."""

    def __init__(self) -> None:
        parts = {"ids": rows.words(), "places": nn.Embedding(LENGTH, WIDTH)}
        super().__init__(embed=lambda: nn.ModuleDict(parts))

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None,
        labels: Any = None, scale: Any = 2.0, add_one: Any = True, **more: Any,
    ) -> Any:  # fmt: skip
        places = torch.arange(LENGTH)[None] if position_ids is None else position_ids
        hidden = self.embed["ids"](input_ids) + self.embed["places"](places) + bool(add_one)
        logits = self.run(hidden * (scale or 1) + (more.get("shift") or 0), attention_mask)
        answer = [logits] if labels is None else [logits, F.cross_entropy(logits, labels)]
        return [*answer, hidden] if more.get("output_hidden_states") else answer


def many_entries() -> Named:
    ids, mask, labels = rows.columns("ids", "mask", "labels")
    places = torch.arange(LENGTH).flip(0).expand(NUM_SAMPLES, LENGTH).clone()
    return Named(input_ids=ids, attention_mask=mask, position_ids=places, labels=labels)


OF_BATCHES = ("input_ids", "attention_mask", "position_ids", "labels")
SOURCES = (
    "e", "e", "e", "None", "e.clone()", "e.clone() + 0", "torch.ones_like(e)", "e[:1]",
    "e.flip(0)", "e[[1, 0, 2, 3]]", "e.double()", "e.bool()", "batch['attention_mask']",
)  # fmt: skip
"""What a forward is given as a parameter whose name the entry `e` of the batch has."""
FLAGS: dict[str, tuple[Any, ...]] = {
    "output_hidden_states": (None, False, True),
    "scale": (2.0, 2, None, 3.0, torch.tensor(3.0), np.float64(2.0), 1),
    "add_one": (True, False, 1, 0, None),
    "shift": (None, 0.0, 0, 0.5, False, torch.tensor(0.5)),
    "num_items_in_batch": (None, 3),
}


@st.composite
def calls(draw: st.DrawFn) -> Case:
    """Draw calls: a source or a flag's value, by parameter; "" is how many have a place."""
    names = st.sampled_from([*FLAGS])
    flag = names.flatmap(lambda n: st.tuples(st.just(n), st.integers(0, len(FLAGS[n]) - 1)))
    source = st.tuples(st.sampled_from(OF_BATCHES), st.sampled_from(SOURCES))
    inputs = st.tuples(st.sampled_from(OF_BATCHES[1:]), st.sampled_from(("e", "e", *SOURCES)))
    usual: Case = {"input_ids": "e", **dict(draw(st.lists(inputs, max_size=3)))}
    usual |= dict(draw(st.lists(flag, max_size=2)))
    usual[""] = draw(st.sampled_from([0, 0, 0, 1, 2, 3, 7]))
    steps = [usual] * (2 * BATCHES_AN_EPOCH)
    for step in draw(st.sets(st.integers(0, len(steps) - 1), max_size=3)):
        odd = dict(draw(st.lists(st.one_of(source, flag), min_size=1, max_size=2)))
        gone = draw(st.sampled_from(["none", "none", *usual]))
        steps[step] = {n: v for n, v in {**usual, **odd}.items() if n != gone or n == ""}
    return {"depth": draw(DEPTHS), "usual": usual, "steps": steps}


def loss_of_answers(call: Case, side: Side) -> list[Any]:
    """Train on all that the model answers."""
    own, batch, order = {}, side.batch, inspect.signature(side.model.forward).parameters
    for name, value in call.items():
        if name in FLAGS:
            own[name] = FLAGS[name][value]
        elif name:
            own[name] = eval(value, NAMES, {"e": batch[name], "batch": batch})
    args = [own.pop(name, order[name].default) for name in [*order][: call[""]]]
    found = [one for one in tree_leaves(side.model(*args, **own)) if isinstance(one, Tensor)]
    side.loss = torch.stack([one.tanh().mean() for one in found if one.requires_grad]).sum()
    return [side.loss.item(), *(float(one.detach().double().sum()) for one in found)]


def judge_calls(case: Case, seen: Seen) -> None:
    usual, steps = case["usual"], case["steps"]
    with Pair(Story(Flagged, many_entries), (case["depth"],), seen) as pair:
        for step, call in enumerate(steps):
            if pair.do(next_batch) == "refused":
                return
            is_plain = {own for name, own in call.items() if name} == {"e"}
            is_due = step > 0 and steps[0] == call == usual and is_plain
            pair.step(partial(loss_of_answers, call), is_due=is_due)
        pair.compare()


# What is done to a model.


class StatefulBlock(rows.Block):
    """Have states, each of which changes what it returns."""

    def __init__(self, norm: Any = nn.Identity) -> None:
        super().__init__(norm)
        self.factors, self.options, self.activation = [1.0], {"gain": 1.0}, torch.tanh
        self.config, self.drop = SimpleNamespace(gain=1.0), nn.Dropout(0.2)
        self.offset = torch.zeros(WIDTH, dtype=torch.float64)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Any:
        gain = self.factors[0] * self.options["gain"] * self.config.gain
        new = self.drop(self.activation(super().forward(hidden)))
        return hidden + gain * new + self.offset + self.shift + getattr(self, "extra", 0.0)


NORMED = partial(StatefulBlock, partial(nn.LayerNorm, WIDTH))
STATEFUL = {
    "texts": Story(rows.model(StatefulBlock)),
    "texts with batch norms": Story(rows.model(partial(StatefulBlock, rows.BatchNorm))),
    "images with layer norms": Story(rows.picture_model(NORMED), rows.images),
    "texts with adapters": Story(rows.model(StatefulBlock), prepare=adapt),
}


@st.composite
def edited_models(draw: st.DrawFn) -> Case:
    """Draw what is done before each step: a line, its block, its value, if behind the batch."""
    place = DEPTHS | st.just(0), st.sampled_from([1.0, 1.5, 0.5])
    seen = st.tuples(st.sampled_from(lines.EDITS), *place, st.booleans())
    unseen = st.tuples(st.sampled_from(lines.UNSEEN_EDITS), *place, st.just(False))
    steps = []
    for step in range(3 * BATCHES_AN_EPOCH):
        begins = step % BATCHES_AN_EPOCH == 0
        num = draw(st.sampled_from([0, 0, 1, 1, 2] if begins else [0, 0, 0, 0, 1]))
        edit = st.one_of(seen, seen, seen, unseen) if begins else seen
        steps.append([draw(edit) for _ in range(num)])
    return {"kind": draw(st.sampled_from([*STATEFUL])), "depth": draw(DEPTHS), "steps": steps}


def usual_loss(side: Side) -> float:
    side.loss = F.cross_entropy(side.model(side.batch[0]), side.batch[1])
    return side.loss.item()


def judge_edits(case: Case, seen: Seen) -> None:
    with Pair(STATEFUL[case["kind"]], (case["depth"],), seen) as pair:
        for step, edits in enumerate(case["steps"]):
            actions: list[Any] = [next_batch]
            for line, block, value, is_behind in edits:
                place = len(actions) if is_behind else 0
                actions.insert(place, partial(lines.edit, line, block, value))
            if any(pair.do(action) == "refused" for action in actions):
                return
            is_due = not any(case["steps"][: step + 1])
            if pair.step(usual_loss, is_due=is_due) == "refused":
                return
            pair.compare()


# How a loop goes through its data.


def named(x: Tensor, y: Tensor) -> Named:
    if x.is_floating_point():
        return Named(pixel_values=x, labels=y)
    return Named(input_ids=x, attention_mask=rows.entries()["mask"], labels=y)


def listed(dataset: Any) -> list[Any]:
    return [tree_map_only(Tensor, torch.clone, dataset[index]) for index in range(NUM_SAMPLES)]


def padded(items: list[Any], kind: Callable[[Any], Any] = dict) -> Any:
    ids = nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)
    labels = torch.stack([item["labels"] for item in items])
    return kind({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels})


def columned(items: list[Any]) -> list[Tensor]:
    return [torch.stack([*map(torch.as_tensor, each)]) for each in zip(*items, strict=True)]


PLACES = torch.arange(NUM_SAMPLES)
DATA: dict[str, tuple[Callable[[Tensor, Tensor], Any], Any]] = {
    "tensors": (TensorDataset, None),
    "named tuples": (Items, lambda items: rows.Pair(*columned(items))),
    "list": (lambda x, y: listed(Items(x, y)), None),
    "folder": (rows.Folder, None),
    "folder of numpy": (lambda x, y: rows.Folder(x.numpy(), y.numpy()), None),
    "labels in a list": (lambda x, y: rows.Folder(x, y.tolist()), None),
    "part": (lambda x, y: Subset(TensorDataset(x, y), PLACES.flip(0)[:9].tolist()), None),
    "named": (named, None),
    "list of dicts": (lambda x, y: listed(named(x, y)), None),
    "nested": (lambda x, y: rows.Nested(x, y, PLACES), None),
    "strings": (lambda x, y: Items(x, y, [*map(str, PLACES)]), None),
    "ragged": (lambda x, y: rows.ragged(), padded),
    "ragged, BatchEncoding": (lambda x, y: rows.ragged(), partial(padded, kind=BatchEncoding)),
    "ragged, UserDict": (lambda x, y: rows.ragged(), partial(padded, kind=UserDict)),
}
"""How data sets are made of inputs and labels, and batches of their samples."""


SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "in order": lambda data: {},
    "shuffled": lambda data: {"shuffle": True},
    "by its own": lambda data: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "repeats": lambda data: {"sampler": [0, 0, 1, 2, 2, 2, 3, 0, 5]},
    "negative": lambda data: {"sampler": [-1, 0, -2, 3, -1, 1]},
    "many": lambda data: {"sampler": RandomSampler(data, True, num_samples=15)},
    "batches": lambda data: {"batch_sampler": [[0, 0, 1], (2, 2), [5, -1, 0, 3], [4]]},
}
LOOKS = ("others", "batch", "batch in training", "older", "inference")


def random_loops(edits: tuple[str, ...] = ("",)) -> st.SearchStrategy[Case]:
    """Draw loops; each epoch may begin with an edit of a sample, and be left early."""
    epoch = {
        "edit": st.tuples(st.sampled_from(edits), st.integers(0, 8)),
        "num_accumulated": st.sampled_from([1, 1, 2, 3]),
        "num_batches": st.sampled_from([99, 99, 99, 1, 2]),
        "is_ahead": st.sampled_from([False, False, True]),
        "look": st.sampled_from(("", *LOOKS)),
        "batch_size": st.sampled_from([4, 4, 4, 2, 3, 5]),
    }
    settings: list[Any] = [{}, {}, {"prefix_chunk": 1}, {"cache_limit_bytes": 1000}]
    # A check of some samples finds an edit late.
    settings += [{"cache_check": "all" if any(edits) else "sampled"}]
    depths = [(2,), (2,), (1,), (3,), (0, 2), (1, 3, 2), (3, 0, 3), (4, 2)]
    loop = {
        "data": st.sampled_from([*DATA]),
        "has_images": st.booleans(),
        "sampler": st.sampled_from([*SAMPLERS]),
        "frozen": st.sampled_from(depths),
        "settings": st.sampled_from(settings),
        "epochs": st.lists(st.fixed_dictionaries(epoch), min_size=2, max_size=3),
    }
    return st.fixed_dictionaries(loop)


def dataset_of(case: Case) -> Any:
    return DATA[case["data"]][0](
        *rows.columns("images" if case["has_images"] else "ids", "labels")
    )


def loader_of(case: Case, dataset: Any, batch_size: int) -> DataLoader[Any]:
    options = SAMPLERS[case["sampler"]](dataset)
    if "batch_sampler" not in options:
        options["batch_size"] = batch_size
    return DataLoader(dataset, collate_fn=DATA[case["data"]][1], **options)


def model_of(case: Case) -> Any:
    is_ragged = "ragged" in case["data"]
    is_named = is_ragged or case["data"] in ("named", "list of dicts")
    kinds = (rows.Pictures, rows.TextModel) if is_named else (Model, Model)
    has_images = case["has_images"] and not is_ragged
    model = kinds[0](embed=rows.patches) if has_images else kinds[1]()
    model.changes = {3: rows.dropped}
    return model


def parts_of(batch: Any) -> tuple[dict[str, Any], Tensor, Any]:
    """Return what the model is given of a batch, its labels, and what else it has."""
    if isinstance(batch, (dict, UserDict)):
        inputs = dict(batch)
        return inputs, inputs.pop("labels"), None
    x, y, *others = batch
    return ({"x": x}, *y) if isinstance(y, (list, tuple)) else ({"x": x}, y, others)


def loss_of(side: Side, batch: Any) -> Tensor:
    inputs, labels, _ = parts_of(batch)
    return F.cross_entropy(side.model(**inputs), labels)


def take(side: Side) -> Any:
    """Take the next batch, and return what it has but its inputs' values."""
    side.waiting.append(batch := next(side.batches, None))
    if batch is None:
        return None
    inputs, labels, others = parts_of(batch)
    shapes = [(name, tuple(one.shape), str(one.dtype)) for name, one in inputs.items()]
    return type(batch).__name__, shapes, labels.tolist(), others


def train_on_first(side: Side) -> float:
    loss = loss_of(side, side.waiting[0])
    (loss / 2).backward()
    return loss.item()


def optimizer_step(side: Side) -> None:
    side.optimizer.step()
    side.optimizer.zero_grad()


def evaluate(kind: str, side: Side) -> float:
    batch, older = side.waiting[0], side.hooks
    older.append(batch)
    if kind == "others":
        batch = side.batch
    elif kind == "older":
        batch = older[len(older) // 3]
    side.model.train(kind == "batch in training")
    with torch.inference_mode() if kind == "inference" else torch.no_grad():
        loss = float(loss_of(side, batch))
    side.model.train()
    return loss


def edit_data(kind: str, index: int, dataset: Any) -> None:
    """Write to a sample, or to its label; or have other samples in its place."""
    dataset = dataset.dataset if isinstance(dataset, Subset) else dataset
    held = "tensors" if isinstance(dataset, TensorDataset) else "columns"
    is_list = isinstance(dataset, list)
    if is_list:
        items = [[*item.values()] if isinstance(item, dict) else item for item in dataset]
        x, y = [item[0] for item in items], [item[-1] for item in items]
    else:
        x, *others = getattr(dataset, held)
        y = others[-1 if isinstance(dataset, (Named, rows.Ragged)) else 0]
    if kind == "item" and is_list:
        dataset[index] = dataset[(index + 1) % len(dataset)]
    elif kind == "item":
        setattr(dataset, held, (x[[*range(1, len(x)), 0]], *others))
    elif kind == "input":
        x[index][0] = 1
    elif kind == "label" and is_list:
        y[index].copy_((y[index] + 1) % 3)
    elif kind == "label":
        y[index] = (y[index] + 1) % 3


def judge_loop(case: Case, seen: Seen) -> None:
    story = Story(partial(model_of, case), partial(dataset_of, case))
    with Pair(story, case["frozen"], seen, settings=case["settings"]) as pair:
        for side in (pair.plain, pair.ours):
            edit_data("input", 0, others := dataset_of(case))
            side.batch = next(iter(DataLoader(others, 4, collate_fn=DATA[case["data"]][1])))
            side.loader = loader_of(case, side.dataset, 4)
        for epoch in case["epochs"]:
            if not go_through(pair, epoch, case):
                return
            pair.compare()


def go_through(pair: Pair, epoch: Case, case: Case) -> bool:
    """Train for an epoch; return False where it ends by an error."""

    def begin(side: Side) -> Any:
        edit_data(*epoch["edit"], side.dataset)
        if side.loader.batch_size not in (None, epoch["batch_size"]):
            side.loader = loader_of(case, side.dataset, epoch["batch_size"])
        side.waiting.clear()
        side.optimizer.zero_grad()
        side.batches = side.cached.epoch(side.loader)
        return take(side)

    if pair.do(begin) != "equal":
        return False
    # Of all blocks there are no rows, as hidden states are dropped between them.
    is_due = "cache_limit_bytes" not in case["settings"] and 0 < pair.ours.cached.num_frozen < 4
    num = 0
    while pair.plain.waiting[0] is not None and num < epoch["num_batches"]:
        num += 1
        if epoch["is_ahead"] and pair.do(take) != "equal":
            return False
        if pair.forward(train_on_first, is_due=is_due) not in ("equal", "served"):
            return False
        actions = [optimizer_step] * (num % epoch["num_accumulated"] == 0)
        actions += [partial(evaluate, epoch["look"])] * bool(epoch["look"])
        actions += [take] * (not epoch["is_ahead"])
        if any(pair.do(action) in ("refused", "raises") for action in actions):
            return False
        for side in (pair.plain, pair.ours):
            side.waiting.pop(0)
    return True


PROPERTIES: dict[str, tuple[Any, Callable[[Case, Seen], None]]] = {
    "changed batches": (CHANGED_BATCHES, judge_changes),
    "calls": (calls(), judge_calls),
    "edited models": (edited_models(), judge_edits),
    "loops": (random_loops(), judge_loop),
    "edited data": (random_loops(("", "input", "label", "item")), judge_loop),
}


_QUICKLY = ("edited models", "edited data")
"""One that changes the model, and one that changes data, order, epochs and evaluations."""


def slow(part: int) -> Any:
    return pytest.param(range(10 * part, 10 * part + 10), marks=pytest.mark.slow, id=f"{part}")


@pytest.mark.parametrize("rounds", [pytest.param(range(1), id="few"), *map(slow, range(10))])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in _QUICKLY)) for n in PROPERTIES],
)
def test_each_step_is_as_without_rows_or_refused(name: str, rounds: range) -> None:
    """Judge rounds of ten cases."""
    cases, judge = PROPERTIES[name]
    seen: Seen = Counter()
    for number in rounds:

        @seed(number)
        @ROUND
        @given(case=cases)
        def holds(case) -> None:  # type: ignore[no-untyped-def]
            judge(case, seen)

        holds()
    assert seen["due and served"] >= 0.95 * seen["due"] > 0, f"few are served: {dict(seen)}"

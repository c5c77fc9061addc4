"""Loops do odd things: they train to the numbers of a loop without rows, or are refused."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

import freeze as freezing
from pipetransformer import attach
from pipetransformer.loop import CachedLoop
from tests.helpers.any_models import KINDS, Kind, build, data, mean_loss, sgd
from tests.helpers.marks import slow
from tests.pipetransformer.loop.test_cached_loop import Samples, frozen_names

TEXTS, IMAGES = KINDS["gpt2_classifier"], KINDS["beit"]
DEPTH = 2


class Plain:
    """Freeze as `attach` does, and give the loader's own batches."""

    def __init__(self, kind: Kind, model: nn.Module) -> None:
        self.kind, self.model, self.num_frozen = kind, model, DEPTH

    def freeze_bottom(self, num_frozen: int) -> None:
        self.num_frozen = num_frozen

    def epoch(self, loader: DataLoader[Any]) -> Iterator[Any]:
        freezing.apply(
            self.model, self.num_frozen, layers=[*self.model.get_submodule(self.kind.blocks)]
        )
        for name in frozen_names(self.kind, self.model, self.num_frozen):
            self.model.get_parameter(name).requires_grad_(False)
        yield from loader


class Loop:
    """Hold what a foreign loop needs, and note its numbers."""

    def __init__(self, kind: Kind, folder: Path | None, loader: DataLoader[Any] | None) -> None:
        self.kind, self.model, self.numbers = kind, build(kind), list[float]()
        self.loader = loader or DataLoader(
            Samples(dict(data(kind).tensors)), batch_size=5, shuffle=True
        )
        self.optimizer = sgd([*self.model.named_parameters()])
        self.cached: Any = Plain(kind, self.model)
        if folder is not None:
            self.cached = attach(self.model, freeze=DEPTH, cache_folder=folder)

    def loss(self, batch: Any, model: nn.Module | None = None) -> Tensor:
        loss = mean_loss(self.kind, model or self.model, batch)
        self.numbers.append(loss.item())
        return loss

    def step(self, batch: Any) -> None:
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def others(self, num: int = 5) -> dict[str, Tensor]:
        """Return samples of another data set."""
        return {name: tensor.flip(0)[:num] for name, tensor in data(self.kind).tensors.items()}

    def train(self, num_epochs: int = 2) -> None:
        for _ in range(num_epochs):
            for batch in self.cached.epoch(self.loader):
                self.step(batch)


def assert_equal(
    do: Callable[[Loop], None], kind: Kind, folder: Path, make: Callable[[], Any] = lambda: None
) -> None:
    """Run a loop with rows and without, and compare its numbers and every weight."""
    plain, ours = Loop(kind, None, make()), Loop(kind, folder, make())
    for loop in (plain, ours):
        torch.manual_seed(3)
        do(loop)
    ours.cached.close()
    assert ours.numbers == pytest.approx(plain.numbers, rel=1e-9, abs=1e-12)
    expected = plain.model.state_dict()
    for name, tensor in ours.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)


def leaves_early_and_keeps_the_iterator(loop: Loop) -> None:
    kept = []
    for _ in range(4):
        kept.append(loop.cached.epoch(loop.loader))
        loop.step(next(kept[-1]))


def trains_a_batch_twice(loop: Loop) -> None:
    for _ in range(2):
        for batch in loop.cached.epoch(loop.loader):
            (loop.loss(batch) + loop.loss(batch)).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def evaluates_copies(loop: Loop) -> None:
    loop.train()
    for batch in loop.cached.epoch(loop.loader):
        loop.step(batch)
        pickled = io.BytesIO()
        torch.save(loop.model, pickled)
        pickled.seek(0)
        copies = copy.deepcopy(loop.model), torch.load(pickled, weights_only=False)
        for one in copies:
            loop.loss(loop.others(), one)
    loop.cached.freeze_bottom(0)
    loop.train()  # Copies keep the weights that they had.
    for one in copies:
        loop.loss(loop.others(), one)


def infers_and_then_trains(loop: Loop) -> None:
    with torch.inference_mode():
        for batch in loop.cached.epoch(loop.loader):
            loop.loss(batch)
    loop.train()


def recomputes_reentrantly(loop: Loop) -> None:
    loop.train(1)
    model: Any = loop.model
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    loop.train()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("do", "kind"),
    [
        (leaves_early_and_keeps_the_iterator, IMAGES),
        slow(trains_a_batch_twice, TEXTS),
        (trains_a_batch_twice, IMAGES),
        (evaluates_copies, TEXTS),
        slow(evaluates_copies, IMAGES),
        (infers_and_then_trains, IMAGES),
        (recomputes_reentrantly, TEXTS),
        slow(recomputes_reentrantly, IMAGES),
    ],
)
def test_an_odd_loop_ends_as_without_rows(
    do: Callable[[Loop], None], kind: Kind, tmp_path: Path
) -> None:
    assert_equal(do, kind, tmp_path)


def changes_batches(loop: Loop) -> None:
    name = "input_ids" if loop.kind is TEXTS else "pixel_values"
    for _ in range(2):
        for batch in loop.cached.epoch(loop.loader):
            loop.step({**batch, name: batch[name].flip(0)})
            batch[name][:, 0] = 3
            loop.step(batch)


def asks_for_hidden_states(loop: Loop) -> None:
    for _ in range(2):
        for batch in loop.cached.epoch(loop.loader):
            given = {name: entry for name, entry in batch.items() if name != "labels"}
            answer = loop.model(**given, output_hidden_states=True)
            loop.numbers.append(answer.hidden_states[1].sum().item())


def calls_a_part(loop: Loop) -> None:
    for _ in range(2):
        for batch in loop.cached.epoch(loop.loader):
            given = {name: entry for name, entry in batch.items() if name != "labels"}
            part: Any = loop.model.base_model
            loop.numbers.append(part(**given).last_hidden_state.sum().item())


def recomputes_late(loop: Loop) -> None:
    for _ in range(2):
        losses = [
            checkpoint(loop.loss, batch, use_reentrant=False)
            for batch in loop.cached.epoch(loop.loader)
        ]
        torch.stack(losses).sum().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def edits_within_a_step(loop: Loop) -> None:
    frozen = next(loop.model.parameters())
    for _ in range(2):
        for batch in loop.cached.epoch(loop.loader):
            loop.step(batch)
            with torch.no_grad():
                frozen.mul_(1.5)
                loop.loss(batch)
                frozen.div_(1.5)


ODD = [changes_batches, asks_for_hidden_states, calls_a_part, recomputes_late, edits_within_a_step]


@pytest.mark.parametrize("do", ODD)
def test_a_forward_of_other_texts_than_the_last_batch_runs_from_its_start(
    do: Callable[[Loop], None], tmp_path: Path
) -> None:
    assert_equal(do, TEXTS, tmp_path)


@pytest.mark.parametrize("do", [one for one in ODD if one not in (changes_batches, calls_a_part)])
def test_images_that_were_not_read_are_read_where_their_rows_are_of_no_use(
    do: Callable[[Loop], None], tmp_path: Path
) -> None:
    assert_equal(do, IMAGES, tmp_path)


@pytest.mark.parametrize(("do", "asked"), [(changes_batches, "flip"), (calls_a_part, "conv2d")])
def test_what_is_computed_of_images_that_were_not_read_is_refused(
    do: Callable[[Loop], None], asked: str, tmp_path: Path
) -> None:
    loop = Loop(IMAGES, tmp_path, None)
    with pytest.raises(
        ValueError, match=f"'{asked}' was asked of 'pixel_values', which was not r"
    ):
        do(loop)
    loop.cached.close()


class Ragged:
    """Give texts without padding, as lists, whose entries come in no fixed order."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        entries = {name: tensor[index] for name, tensor in data(TEXTS).tensors.items()}
        ids = entries["input_ids"][: int(entries["attention_mask"].sum())].tolist()
        item = {"input_ids": ids, "text": "needed", "labels": int(entries["labels"])}
        return item if index % 2 else dict(reversed(item.items()))


def pad(items: list[dict[str, Any]]) -> BatchEncoding:
    assert all(item["text"] == "needed" for item in items)
    longest = max(len(item["input_ids"]) for item in items)
    ids = [item["input_ids"] + [0] * (longest - len(item["input_ids"])) for item in items]
    mask = [[int(token > 0) for token in text] for text in ids]
    labels = [item["labels"] for item in items]
    return BatchEncoding(
        {"input_ids": ids, "attention_mask": mask, "labels": labels}, tensor_type="pt"
    )


def moves_batches(loop: Loop) -> None:
    for _ in range(3):
        for batch in loop.cached.epoch(loop.loader):
            loop.numbers += batch["input_ids"].flatten().tolist()
            loop.step(batch.to("cpu"))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True},
        {"batch_sampler": [[0, 0, 1], [2, 2, 2], [5, 6, 0], [9]]},
        {"batch_size": 4, "shuffle": True, "num_workers": 1, "persistent_workers": True},
    ],
    ids=["shuffled", "duplicates", "persistent_workers"],
)
def test_a_loader_s_batches_come_as_without_rows(options: Any, tmp_path: Path) -> None:
    assert_equal(
        moves_batches, TEXTS, tmp_path, lambda: DataLoader(Ragged(), collate_fn=pad, **options)
    )


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(TEXTS, tmp_path, None)
    yield loop
    loop.cached.close()


def test_a_block_that_was_thawed_by_hand_is_refused(loop: Loop) -> None:
    loop.train()
    batches = loop.cached.epoch(loop.loader)
    batch = next(batches)
    loop.model.requires_grad_(True)
    with pytest.raises(
        ValueError, match="needs a gradient again.*thaw by what you gave as freeze="
    ):
        loop.step(batch)


def test_autocast_that_rows_were_not_computed_in_is_refused(loop: Loop) -> None:
    batches = loop.cached.epoch(loop.loader)
    batch = next(batches)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match="in torch.bfloat16, but rows .* in no autocast"):
            loop.step(batch)


def test_autocast_is_refused_before_anything_freezes(tmp_path: Path) -> None:
    """It was only where rows were first read, behind an epoch."""
    loop = Loop(TEXTS, None, None)
    with attach(loop.model, freeze=[0, DEPTH], cache_folder=tmp_path) as loop.cached:
        batch = next(loop.cached.epoch(loop.loader))
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(ValueError, match="in torch.bfloat16, but rows .* in no autocast"):
                loop.step(batch)


def test_a_loop_without_rows_may_compute_in_any_autocast() -> None:
    loop = Loop(TEXTS, None, None)
    with attach(loop.model, freeze=[0, DEPTH], cache=False) as loop.cached:
        with torch.autocast("cpu", torch.bfloat16):
            loop.train(2)
    assert all(map(math.isfinite, loop.numbers))


def test_what_has_ended_gives_no_more_batches(loop: Loop) -> None:
    older, newer = (loop.cached.epoch(loop.loader) for _ in range(2))
    next(older), next(newer)
    with pytest.raises(ValueError, match="the loop was closed or has begun another epoch"):
        next(older)
    loop.step(next(newer))
    loop.cached.close()
    with pytest.raises(ValueError, match="this loop was closed; attach the model anew"):
        next(loop.cached.epoch(loop.loader))


def test_a_model_is_attached_once(loop: Loop) -> None:
    loop.train(1)
    with attach(loop.model, freeze=DEPTH) as other:
        with pytest.raises(ValueError, match="the model is attached already; close"):
            next(other.epoch(loop.loader))
    loop.train(1)


def test_adapters_that_are_switched_off_are_not_in_rows(tmp_path: Path) -> None:
    options: Any = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
    model: Any = peft.get_peft_model(build(TEXTS), config).double()  # type: ignore[arg-type]
    entries = dict(data(TEXTS).tensors)
    del entries["labels"]
    with model.disable_adapter():
        expected = model(**entries).logits
    loader: DataLoader[Any] = DataLoader(Samples(entries), batch_size=10)
    with attach(model, freeze=DEPTH, cache_folder=tmp_path) as cached:
        for batch in cached.epoch(loader):
            with model.disable_adapter():
                torch.testing.assert_close(model(**batch).logits, expected)


def test_a_wrapper_is_refused(loop: Loop) -> None:
    with pytest.raises(TypeError, match="give model.module, the GPT2ForSequenceClassification"):
        attach(nn.DataParallel(loop.model), freeze=DEPTH)


def test_a_data_set_that_has_grown_is_refused() -> None:
    texts = [Samples(dict(data(TEXTS).tensors))[index] for index in range(6)]
    loader: DataLoader[Any] = DataLoader(texts, batch_size=3)  # type: ignore[arg-type]
    with attach(build(TEXTS), freeze=DEPTH) as cached:
        assert len(list(cached.epoch(loader))) == 2
        texts.append(texts[0])
        with pytest.raises(ValueError, match="has 7 samples, but had 6 in the first epoch"):
            next(cached.epoch(loader))


def test_an_evaluation_within_an_epoch_is_no_reason_to_warn(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        for batch in loop.cached.epoch(loop.loader):
            loop.step(batch)
            loop.model.eval()
            loop.loss(loop.others(3))
            loop.model.train()
    assert "given other inputs" not in caplog.text
    for _ in loop.cached.epoch(loop.loader):
        loop.loss(loop.others(3))
    assert "given other inputs" in caplog.text


def mask_what_is_padded(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = dict(pad(items))
    if batch["attention_mask"].all():
        del batch["attention_mask"]
    return batch


def test_a_mask_that_the_first_samples_lack_is_refused() -> None:
    texts = [Ragged()[9 if index == 9 else 0] for index in range(10)]
    loader: DataLoader[Any] = DataLoader(
        texts,  # type: ignore[arg-type]
        batch_sampler=[[0, 0], [0, 9, 5]],
        collate_fn=mask_what_is_padded,
    )
    with attach(build(TEXTS), freeze=DEPTH) as cached:
        with pytest.raises(
            ValueError, match=r"not all of them have \['attention_mask'\]: give these in all"
        ):
            list(cached.epoch(loader))


class Endless:
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0, 1]


def test_a_sampler_without_an_end_is_refused(tmp_path: Path) -> None:
    texts = Samples(dict(data(TEXTS).tensors))
    # Without workers it would be drawn as needed.
    loader: DataLoader[Any] = DataLoader(texts, batch_sampler=Endless(), num_workers=1)  # type: ignore[arg-type]
    with attach(build(TEXTS), freeze=DEPTH, cache_folder=tmp_path) as cached:
        with pytest.raises(ValueError, match="seems to have no end"):
            next(cached.epoch(loader))


def test_a_mask_that_is_taken_for_labels_serves_no_rows(tmp_path: Path) -> None:
    kind = KINDS["deberta"]
    entries, model = data(kind).tensors, build(kind).eval()
    loader = DataLoader(
        TensorDataset(entries["input_ids"], entries["attention_mask"]), batch_size=5
    )
    expected = [model(ids, attention_mask=mask).logits for ids, mask in loader]
    cached: CachedLoop
    with attach(model, freeze=DEPTH, cache_folder=tmp_path) as cached:
        for _ in range(2):
            for (ids, mask), logits in zip(cached.epoch(loader), expected, strict=True):
                torch.testing.assert_close(model(ids, attention_mask=mask).logits, logits)

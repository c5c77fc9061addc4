"""Samples of several rows are served: columns, each with a call of its own, and blocks of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import freeze as freezing
from pipetransformer import FreezeCallback, attach
from pipetransformer.loop.batches.pieces import Pieces, SampleRows, order_of_rows
from tests.helpers.marks import slow
from tests.helpers.row_models import (
    DEPTH,
    NUM_SAMPLES,
    WORDS,
    BatchNorm,
    Block,
    Items,
    MaskedModel,
    Model,
    OverBatch,
    TextModel,
    block_with,
    entries,
    patches,
)
from tests.helpers.row_stories import (
    Loop,
    Story,
    assert_right_or_refused,
    assert_served,
    made,
    noting,
)

Caplog = pytest.LogCaptureFixture
Batch = Mapping[str, Tensor]
PAD = 3
"""No zero, as other paddings would hide what is padded with zeros by mistake."""


def served(**named: tuple[Story, int]) -> pytest.MarkDecorator:
    """Name stories, and how many rows each sample has."""
    own = [
        pytest.param(story, num, id=name, marks=[pytest.mark.slow] * (name == "workers"))
        for name, (story, num) in named.items()
    ]
    return pytest.mark.parametrize(("story", "num_pieces"), own)


def stories(**named: Story) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("story", [pytest.param(s, id=n) for n, s in named.items()])


# Columns: the model is called once for each.


def texts(column: int, num: int = NUM_SAMPLES) -> list[list[int]]:
    """Make texts of 2 to 7 words; columns have other ones, of other lengths."""
    return [
        [(7 * place + 3 * word + 5 * column) % (WORDS - 4) + 4 for word in range(length)]
        for place, length in ((p, 2 + (p * (column + 1) + column) % 6) for p in range(num))
    ]


def padded(several: list[list[int]], length: int | None = None) -> dict[str, Tensor]:
    longest = length or max(map(len, several))
    return {
        "input_ids": torch.tensor([one + [PAD] * (longest - len(one)) for one in several]),
        "attention_mask": torch.tensor(
            [[1] * len(one) + [0] * (longest - len(one)) for one in several]
        ),
    }


def labels() -> list[float]:
    return [(place % 5) / 4 for place in range(NUM_SAMPLES)]


def of_columns(items: list[Any], lengths: Mapping[int, int] | None = None) -> list[Any]:
    """Pad each column by itself, as sentence-transformers' collators do."""
    *own, last = zip(*items, strict=True)
    several = [padded([*one], (lengths or {}).get(c)) for c, one in enumerate(own)]
    return [*several, torch.tensor(last, dtype=torch.float64)]


def sentences(num_columns: int) -> Items:
    return Items(*(texts(column) for column in range(num_columns)), labels())


def cosine(loop: Loop, batch: Any) -> Tensor:
    one, other, due = batch
    return F.mse_loss(torch.cosine_similarity(loop.model(**one), loop.model(**other)), due)


def triplet(loop: Loop, batch: Any) -> Tensor:
    own = [loop.model(one["input_ids"], one["attention_mask"]) for one in batch[:3]]
    return F.triplet_margin_loss(*own) + 0 * batch[3].sum()


def triplet_of_images(loop: Loop, batch: Any) -> Tensor:
    return F.triplet_margin_loss(*map(loop.model, batch))


def by_names(loop: Loop, batch: Batch) -> Tensor:
    one = loop.model(batch["a_ids"], attention_mask=batch["a_mask"])
    other = loop.model(batch["b_ids"], attention_mask=batch["b_mask"])
    return F.mse_loss(torch.cosine_similarity(one, other), batch["label"])


def with_one_mask(loop: Loop, batch: Batch) -> Tensor:
    one, other = (loop.model(batch[name], batch["mask"]) for name in ("a_ids", "b_ids"))
    return F.cosine_embedding_loss(one, other, batch["label"] * 2 - 1)


def named(items: list[Any]) -> dict[str, Any]:
    one, other, due = of_columns(items)
    names = {"input_ids": "ids", "attention_mask": "mask"}
    columns = {
        f"{c}_{names[n]}": t for c, own in (("a", one), ("b", other)) for n, t in own.items()
    }
    return {**columns, "label": due}


def of_one_length() -> Any:
    ids = entries()["ids"]
    return [
        {"a_ids": ids[place], "b_ids": ids[place].flip(0), "mask": entries()["mask"][place],
         "label": torch.tensor(float(place % 2), dtype=torch.float64)}
        for place in range(NUM_SAMPLES)
    ]  # fmt: skip


def gradient_cached(loop: Loop, batch: Any) -> Tensor:
    """Embed chunks without gradients, then again with those of the loss of all."""
    chunks = [{n: e[at : at + 2] for n, e in one.items()} for one in batch[:2] for at in (0, 2)]
    with torch.no_grad():
        found = torch.cat([loop.model(**one) for one in chunks])
    with torch.enable_grad():
        one, other = found.requires_grad_().chunk(2)
        F.cross_entropy(one @ other.T, torch.arange(len(one))).backward()
    assert found.grad is not None
    return (torch.cat([loop.model(**one) for one in chunks]) * found.grad).sum()


def three_images() -> TensorDataset:
    images = entries()["images"]
    return TensorDataset(images, images.flip(0), images.roll(1, 0))


SIAMESE = Story(MaskedModel, partial(sentences, 2), cosine, loader={"collate_fn": of_columns})
FIXED = {"collate_fn": partial(of_columns, lengths={0: 8, 1: 8})}
UNEQUAL = {"collate_fn": partial(of_columns, lengths={0: 8, 1: 11})}
TRIPLET = Story(TextModel, partial(sentences, 3), triplet, loader={"collate_fn": of_columns})
IMAGES = Story(partial(Model, embed=patches), three_images, triplet_of_images)


@served(
    padded_by_column=(SIAMESE, 2),
    a_length_for_each=(replace(SIAMESE, loader=UNEQUAL), 2),
    names=(replace(SIAMESE, loss=by_names, loader={"collate_fn": named}), 2),
    a_common_mask=(Story(MaskedModel, of_one_length, with_one_mask), 2),
    triplets=(TRIPLET, 3),
    triplets_of_images=(IMAGES, 3),
    chunks=(replace(SIAMESE, loss=gradient_cached), 2),
    batches_that_are_looked_at=(
        replace(SIAMESE, loss=noting(loss=cosine)), 2),
)  # fmt: skip
def test_columns_are_served(story: Story, num_pieces: int, caplog: Caplog) -> None:
    assert_served(story, caplog, num_pieces=num_pieces)


def changed_in_one_column(loop: Loop, batch: Any) -> Tensor:
    one, other, due = batch
    is_first = not loop.numbers
    turned = other if is_first else {**other, "input_ids": other["input_ids"].flip(0)}
    return F.mse_loss(torch.cosine_similarity(loop.model(**one), loop.model(**turned)), due)


def exchanged(loop: Loop, batch: Any) -> Tensor:
    """Give a text the mask of the other column's, in the loop's first batch, too."""
    one, other, due = batch
    found = loop.model(one["input_ids"], other["attention_mask"]), loop.model(**other)
    return F.mse_loss(torch.cosine_similarity(*found), due)


def test_an_entry_that_is_changed_in_a_column_runs_from_its_start(caplog: Caplog) -> None:
    story = replace(SIAMESE, loss=changed_in_one_column)
    assert_right_or_refused(story, caplog)
    loop = Loop(story).train(attached=True)
    assert loop.hits[-1] >= NUM_SAMPLES, "the other column has rows"
    assert loop.rows_run[-1] >= NUM_SAMPLES * DEPTH


@stories(
    another_mask=replace(SIAMESE, loss=exchanged, loader=FIXED),
    mixes_its_rows=replace(SIAMESE, model=partial(MaskedModel, block_with(OverBatch))),
    images_of_two_sizes=Story(
        partial(Model, embed=patches),
        lambda: TensorDataset(entries()["images"], entries()["images"].repeat(1, 2, 1)),
        lambda loop, batch: F.mse_loss(*map(loop.model, batch)),
    ),
    unread_lengths=Story(
        Model,
        lambda: TensorDataset(entries()["ids"], entries()["ids"].repeat(1, 2)),
        lambda loop, batch: F.mse_loss(*map(loop.model, batch)),
    ),
)
def test_columns_whose_rows_would_be_wrong_are_right_or_refused(
    story: Story, caplog: Caplog
) -> None:
    assert_right_or_refused(story, caplog)


# Blocks: an entry has several rows a sample.


def preferred(items: list[Any], *, order: str = "blocks") -> dict[str, Tensor]:
    """Collate as TRL does: all chosen texts, then all rejected ones; or one by one."""
    chosen, rejected, margins = zip(*items, strict=True)
    pairs = [one for pair in zip(chosen, rejected, strict=True) for one in pair]
    rows = [*chosen, *rejected] if order == "blocks" else pairs
    own = padded(rows)
    seen = torch.arange(own["input_ids"].shape[1]) >= 1
    return {
        **own,
        "completion_mask": own["attention_mask"] * seen,
        "margin": torch.tensor(margins, dtype=torch.float64),
    }


interleaved = partial(preferred, order="pairs")


def reward(loop: Loop, batch: Batch) -> Tensor:
    scores = loop.model(batch["input_ids"], attention_mask=batch["attention_mask"])[:, 0]
    chosen, rejected = scores.chunk(2)
    return -F.logsigmoid(chosen - rejected - batch["margin"]).mean()


def reward_of_pairs(loop: Loop, batch: Batch) -> Tensor:
    scores = loop.model(batch["input_ids"], attention_mask=batch["attention_mask"])[:, 0]
    share = batch["completion_mask"].sum(1) / 10
    return -F.logsigmoid((scores[0::2] - scores[1::2]) * share[0::2] - batch["margin"]).mean()


def with_a_reference(loop: Loop, batch: Batch) -> Tensor:
    given = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        due = made(MaskedModel, 5)(*given)
    gap = (loop.model(*given) - due)[:, 0] * batch["completion_mask"].sum(1)
    chosen, rejected = gap.chunk(2)
    return -F.logsigmoid(chosen - rejected).mean() - batch["margin"].mean()


def in_two_forwards(loop: Loop, batch: Batch) -> Tensor:
    (ids, other), (mask, others) = (batch[n].chunk(2) for n in ("input_ids", "attention_mask"))
    return F.softplus(loop.model(other, others) - loop.model(ids, mask)).mean()


PREFERRED = Story(MaskedModel, partial(sentences, 2), reward, loader={"collate_fn": preferred})
PAIRS = replace(PREFERRED, loss=reward_of_pairs, loader={"collate_fn": interleaved})


def a_row_each_of_a_column_and_blocks(items: list[Any]) -> list[Any]:
    """Give a query, and two answers to it: columns of one row and of two."""
    first, second, last, due = zip(*items, strict=True)
    return [padded([*first]), padded([*second, *last]), torch.tensor(due)]


def answers(loop: Loop, batch: Any) -> Tensor:
    query, (good, bad) = loop.model(**batch[0]), loop.model(**batch[1]).chunk(2)
    return F.triplet_margin_loss(query, good, bad) + 0 * batch[2].sum()


@served(
    blocks=(PREFERRED, 2),
    pairs=(PAIRS, 2),
    a_reference=(replace(PREFERRED, loss=with_a_reference), 2),
    two_forwards=(replace(PREFERRED, loss=in_two_forwards), 2),
    workers=(replace(PREFERRED, loader={"collate_fn": preferred, "num_workers": 1}), 2),
    pairs_looked_at=(replace(PAIRS, loss=noting(loss=reward_of_pairs)), 2),
    query_and_answers=(
        Story(MaskedModel, partial(sentences, 3), answers,
              loader={"collate_fn": a_row_each_of_a_column_and_blocks}), 3),
)  # fmt: skip
def test_rows_of_blocks_and_of_pairs_are_served(
    story: Story, num_pieces: int, caplog: Caplog
) -> None:
    assert_served(story, caplog, num_pieces=num_pieces)


# What else a loop does with them.


def ahead(loop: Loop, batch: Any) -> Tensor | None:
    """Train on the batch before."""
    loop.waiting.append(batch)
    return cosine(loop, loop.waiting.pop(0)) if len(loop.waiting) > 1 else None


def correct_a_label(loop: Loop) -> None:
    loop.dataset.tensors[2][5] = -loop.dataset.tensors[2][5]


def of_images(loop: Loop, batch: Any) -> Tensor:
    return F.cosine_embedding_loss(loop.model(batch[0]), loop.model(batch[1]), batch[2])


def two_images() -> TensorDataset:
    images = entries()["images"]
    return TensorDataset(images, images.flip(0), (torch.arange(NUM_SAMPLES) % 2 * 2 - 1).double())


def edit_a_column(loop: Loop) -> None:
    loop.dataset.tensors[1][3] += 1


def guessed(items: list[Any]) -> dict[str, Any]:
    """Name the first column as the model does, so that it is served from the start."""
    one, other, due = of_columns(items)
    return {**one, **{f"other_{name}": entry for name, entry in other.items()}, "labels": due}


def of_guessed(loop: Loop, batch: Batch) -> Tensor:
    one = loop.model(batch["input_ids"], attention_mask=batch["attention_mask"])
    other = loop.model(batch["other_input_ids"], attention_mask=batch["other_attention_mask"])
    return F.mse_loss(torch.cosine_similarity(one, other), batch["labels"])


def permuted_pairs(loop: Loop, batch: Batch) -> Tensor:
    """Give rows in another order, some of them twice."""
    order = torch.tensor([*range(len(batch["input_ids"]))][::-1] + [0])
    taken = batch["input_ids"][order], batch["attention_mask"][order]
    return (loop.model(*taken) * torch.arange(len(order))[:, None]).square().mean()


def joined_batches(loop: Loop, batch: Batch) -> Tensor | None:
    """Join the rows of two batches of one length."""
    loop.waiting.append(batch)
    if len(loop.waiting) < 2:
        return None
    both = [torch.cat([one[n] for one in loop.waiting]) for n in ("input_ids", "attention_mask")]
    loop.waiting.clear()
    return loop.model(*both).square().mean()


def of_one_length_each(items: list[Any]) -> dict[str, Tensor]:
    chosen, rejected, _ = zip(*items, strict=True)
    return padded([*chosen, *rejected], 8)


def added_up(loop: Loop, batch: Any) -> Tensor | None:
    """Wait for the whole epoch, and learn from all losses at once."""
    loop.waiting.append(of_images(loop, batch))
    if len(loop.waiting) < 3:
        return None
    loss = torch.stack(loop.waiting).sum()
    loop.waiting.clear()
    return loss


TWICE: Any = {"batch_sampler": [[0, 0, 1], [2, 2, 2, 4], [5, 3, 0, -1], [6, 7, 8, 9, 10, 11, 1]]}
PAIR = Story(partial(Model, embed=patches), two_images, of_images)
NORMED = partial(Model, Block, Block, Block, block_with(BatchNorm), embed=patches)


@served(
    a_guessed_column=(replace(SIAMESE, loss=of_guessed, loader={"collate_fn": guessed}), 2),
    a_batch_taken_ahead=(replace(SIAMESE, loss=ahead), 2),
    a_corrected_label=(replace(PAIR, edit=correct_a_label, edit_epoch=2, num_epochs=4), 2),
    an_edited_column=(replace(PAIR, edit=edit_a_column, num_epochs=4), 2),
    losses_added_up=(replace(PAIR, model=NORMED, loss=added_up), 2),
    rows_in_another_order=(replace(PREFERRED, loss=permuted_pairs), 2),
    rows_of_two_batches=(
        replace(PREFERRED, loss=joined_batches, num_epochs=4,
                loader={"collate_fn": of_one_length_each}), 2),
)  # fmt: skip
def test_odd_loops_over_columns_are_served(story: Story, num_pieces: int, caplog: Caplog) -> None:
    assert_served(story, caplog, num_pieces=num_pieces)


@stories(
    columns=replace(SIAMESE, loader={"collate_fn": of_columns, "batch_size": 3}),
    blocks=replace(PREFERRED, loader={"collate_fn": preferred, "batch_size": 3}),
)
def test_samples_that_come_twice_have_their_rows(story: Story) -> None:
    loops = [Loop(story) for _ in range(2)]
    for loop in loops:
        loop.loader = DataLoader(loop.dataset, **TWICE, collate_fn=story.loader["collate_fn"])
        loop.train(attached=loop is loops[0])
    ours, plain = loops
    assert ours.numbers == pytest.approx(plain.numbers, rel=1e-9)
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(ours.tensors()[name], tensor, rtol=1e-9, atol=1e-9)
    assert ours.hits[-1] == 2 * sum(map(len, TWICE["batch_sampler"]))


def joined(loop: Loop, batch: Any) -> Tensor:
    both = torch.cat([batch[0], batch[1]])
    return F.cosine_embedding_loss(*loop.model(both).chunk(2), batch[2])


def test_columns_that_are_joined_to_one_forward_are_refused() -> None:
    with pytest.raises(ValueError, match="this one is given nothing of it"):
        trained(replace(PAIR, loss=joined), [2, 2], attached=True)


def trained(
    story: Story, freeze: list[int], *, attached: bool, **settings: Any
) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Return losses, weights, and hits by epoch."""
    torch.manual_seed(3)
    loop = Loop(story)
    cached: Any = attach(loop.model, freeze=freeze, **settings) if attached else None
    hits = []
    for num_frozen in freeze:
        if not attached:
            freezing.apply(loop.model, num_frozen, layers=[*loop.model.blocks])
        for batch in cached.epoch(loop.loader) if attached else loop.loader:
            loss = story.loss(loop, batch)
            loop._step(loss)
        hits.append(cached.stats.hits if attached else 0)
    if attached:
        cached.close()
    return loop.numbers, loop.tensors(), hits


@pytest.mark.parametrize(
    ("story", "freeze"),
    [(SIAMESE, [0, 1, 2, 2]), (PREFERRED, [1, 1, 3, 3]), slow(PAIRS, [0, 1, 2, 2])],
    ids=["columns", "blocks", "pairs"],
)
def test_rows_of_pieces_grow_deeper(story: Story, freeze: list[int]) -> None:
    numbers, weights, _ = trained(story, freeze, attached=False)
    ours, own, hits = trained(story, freeze, attached=True)
    assert ours == pytest.approx(numbers, rel=1e-9)
    for name, tensor in weights.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-9, atol=1e-9)
    assert hits[-1] == 2 * NUM_SAMPLES


@pytest.mark.parametrize("story", [SIAMESE, PREFERRED], ids=["columns", "blocks"])
def test_kept_rows_of_pieces_serve_the_next_run(story: Story, tmp_path: Path) -> None:
    settings: Any = {"cache_folder": str(tmp_path), "cache_keep": True}
    numbers, weights, _ = trained(story, [2, 2, 2], attached=False)
    for is_second in (False, True):
        ours, own, hits = trained(story, [2, 2, 2], attached=True, **settings)
        assert ours == pytest.approx(numbers, rel=1e-9)
        for name, tensor in weights.items():
            torch.testing.assert_close(own[name], tensor, rtol=1e-9, atol=1e-9)
        assert hits[-1] == 2 * NUM_SAMPLES
        # Of the first batch, it is yet to be seen what columns it has.
        assert hits[0] >= 2 * (NUM_SAMPLES - 4) if is_second else hits[0] == 0


class Encoder(MaskedModel):
    """Return what a bare encoder does: a hidden state for each token, and something beside."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return {"tokens": hidden, "first": torch.tanh(hidden[:, 0])}


def pooled(loop: Loop, batch: Any) -> Tensor:
    found = []
    for one in batch[:2]:
        weights = one["attention_mask"][..., None] / one["attention_mask"].sum(1)[:, None, None]
        found.append((loop.model(**one)["tokens"] * weights).sum(1))
    return F.mse_loss(torch.cosine_similarity(*found), batch[2])


@pytest.mark.parametrize("ignores_padding", [True, False])
def test_padding_of_a_bare_encoder_is_ignored_where_that_is_promised(
    ignores_padding: bool, caplog: Caplog
) -> None:
    story = replace(SIAMESE, model=Encoder, loss=pooled)
    numbers, weights, _ = trained(story, [2, 2, 2], attached=False)
    ours, own, hits = trained(story, [2, 2, 2], attached=True, ignores_padding=ignores_padding)
    assert ours == pytest.approx(numbers, rel=1e-9)
    for name, tensor in weights.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-9, atol=1e-9)
    assert hits[-1] == (2 * NUM_SAMPLES if ignores_padding else 0)
    assert ("the model names no padding_mask" in caplog.text) is not ignores_padding


class OfColumns(transformers.Trainer):
    """Call the model once for each column."""

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        names = ("input_ids", "attention_mask")
        found = [
            model(**{name: inputs[f"{column}{name}"] for name in names}).logits
            for column in ("", "other_")
        ]
        return F.mse_loss(torch.cosine_similarity(*found), inputs["labels"])


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, slow(1)])
def test_columns_are_served_in_others_trainers(num_workers: int, tmp_path: Path) -> None:
    def run(callback: FreezeCallback) -> dict[str, Tensor]:
        transformers.set_seed(0)
        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
            intermediate_size=16, pad_token_id=PAD, max_position_embeddings=16,
        )  # fmt: skip
        own = transformers.BertForSequenceClassification(config).double()
        arguments = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=4, per_device_train_batch_size=4, use_cpu=True,
            remove_unused_columns=False, report_to=[], save_strategy="no", learning_rate=1e-3,
            disable_tqdm=True, dataloader_num_workers=num_workers,
        )  # fmt: skip
        data: Any = sentences(2)
        OfColumns(own, arguments, guessed, data, callbacks=[callback]).train()
        return own.state_dict()

    plain = run(FreezeCallback(freeze=[0, 2, 2, 2], cache=False))
    callback = FreezeCallback(freeze=[0, 2, 2, 2], cache_folder=str(tmp_path))
    for name, tensor in run(callback).items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-9, atol=1e-9)
    assert callback.stats.hits >= 4 * NUM_SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TRL: DPOTrainer", slow("TRL: RewardTrainer")])
def test_trl_s_own_losses_of_pairs_are_served(name: str) -> None:
    pytest.importorskip("trl")
    from experiments.foreign_loops.runner import outcome_of
    from experiments.foreign_loops.trainers import LOOPS

    outcome = outcome_of(next(one for one in LOOPS if one.name == name))
    assert (outcome.kind, outcome.said) == ("cached", ())
    assert outcome.apart <= 2e-5


# Refusals, each beside its neighbour above.


def test_views_of_samples_of_several_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="cache_views= keeps no views of samples with several"):
        trained(PREFERRED, [2, 2], attached=True, cache_views=2)


def shuffled(items: list[Any]) -> dict[str, Tensor]:
    """Collate chosen and rejected texts in no order."""
    batch = preferred(items)
    order = batch["input_ids"].sum(1).argsort()
    return {name: entry[order] for name, entry in batch.items() if len(entry) == len(order)}


def of_ragged(items: list[Any]) -> dict[str, Tensor]:
    """Give all words of a batch as rows."""
    words = torch.tensor([word for one, *_ in items for word in one])
    return {"input_ids": words[:, None], "attention_mask": torch.ones_like(words)[:, None]}


@pytest.mark.parametrize("collate", [shuffled, of_ragged])
def test_rows_in_no_order_or_of_no_number_are_refused(collate: Any) -> None:
    story = replace(PREFERRED, loader={"collate_fn": collate})
    with pytest.raises(ValueError, match="nothing in it has a row for each sample"):
        trained(story, [2, 2], attached=True)


def of_two_orders(items: list[Any]) -> dict[str, Tensor]:
    return {**preferred(items), "attention_mask": interleaved(items)["attention_mask"]}


def test_entries_of_two_orders_that_are_given_at_once_are_refused() -> None:
    story = replace(PREFERRED, loss=in_two_forwards, loader={"collate_fn": of_two_orders})
    with pytest.raises(
        ValueError, match=r"\['input_ids', 'attention_mask'\] at once, and samples"
    ):
        trained(story, [2, 2], attached=True)


class Whole(nn.Module):
    """Take a mapping, as a SentenceTransformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.words = MaskedModel()

    @property
    def blocks(self) -> nn.ModuleList:
        return self.words.blocks

    def forward(self, features: Batch) -> Tensor:
        return F.normalize(self.words(features["input_ids"], features["attention_mask"]))


def test_a_whole_that_is_given_a_mapping_names_its_part() -> None:
    def cosine_of_wholes(loop: Loop, batch: Any) -> Tensor:
        return F.mse_loss((loop.model(batch[0]) * loop.model(batch[1])).sum(1), batch[2])

    story = replace(SIAMESE, model=Whole, loss=cosine_of_wholes)
    with pytest.raises(ValueError, match=r"part 'words': attach that, model.get_submodule\('wor"):
        trained(story, [0, 2], attached=True)


def test_rows_are_numbered_as_they_lie() -> None:
    pieces = Pieces((SampleRows(), SampleRows(2, is_blockwise=True), SampleRows(2)))
    samples = torch.tensor([3, 0])
    assert pieces.column_rows == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [pieces.ids(samples, column).tolist() for column in range(3)] == [
        [15, 0],
        [16, 1, 17, 2],
        [18, 19, 3, 4],
    ]


@pytest.mark.parametrize("is_blockwise", [True, False])
def test_an_order_is_told_by_rows_that_differ(is_blockwise: bool) -> None:
    def collate(items: list[Any]) -> dict[str, Tensor]:
        rows = [[item, item + 100] for item in items]
        ids = torch.tensor(rows).T.flatten() if is_blockwise else torch.tensor(rows).flatten()
        return {"ids": ids, "mask": torch.ones_like(ids), "sorted": ids.sort().values}

    found = order_of_rows(collate, [1, 1, 2, 3], {"ids": 2, "mask": 2, "sorted": 2})
    assert found == dict.fromkeys(("ids", "mask"), SampleRows(2, is_blockwise))

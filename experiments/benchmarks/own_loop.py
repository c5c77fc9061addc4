"""Time a loop of one's own with frozen blocks: step by step in turn, on the same batches.

    plain    `freeze.apply`, and every block runs
    by_hand  twenty lines: a dict of the frozen blocks' outputs, and the blocks above run by hand
    ours     `pipetransformer.attach`
    kept     the same, with rows that are kept on disk
    second   the first epoch of a later run over those rows

In the first epoch outputs are computed and stored ("fill"), in the two others they are read
("warm"). Losses are compared first: all must be those of the plain loop. Models are random, and
have no dropout: MiniLM's shape, ViT-S at 112 pixels, GPT-2 small with 5,000 words. Two thirds of
the blocks are frozen.
Run it as `python -m experiments.benchmarks.own_loop [minilm] [vit] [gpt2]`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import freeze
from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.rounds import ResultsDifferError, bootstrap, seconds_of
from pipetransformer import attach

BARS = Bars(
    most={"fill_over_by_hand": 1.03, "warm_over_by_hand": 1.03, "second_over_kept_warm": 1.05},
    least={"plain_over_warm": 1.5},
)
NUM_STEPS, NUM_EPOCHS = 12, 3


@dataclass(frozen=True)
class Case:
    """Describe a loop.

    Args:
        blocks: of the model, bottom first.
        below: runs what lies below the blocks, and the frozen ones.
        above: the loss from what the frozen blocks return.
    """

    name: str
    build: Callable[[], nn.Module]
    items: list[dict[str, Tensor]]
    batch_size: int
    num_frozen: int
    blocks: Callable[[Any], Any]
    below: Callable[[Any, Mapping[str, Tensor], int], Tensor]
    above: Callable[[Any, Tensor, Mapping[str, Tensor], int], Tensor]
    loss: Callable[[Any, Mapping[str, Tensor]], Tensor]


class Numbered:
    """Give each item with its place, as the dict needs it."""

    def __init__(self, items: list[dict[str, Tensor]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, **self.items[index]}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _loader(case: Case, dataset: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(dataset, case.batch_size, shuffle=True, generator=generator)


def plain(case: Case) -> Iterator[float]:
    model = case.build()
    optimizer, loader = _optimizer(model), _loader(case, case.items)
    freeze.apply(model, case.num_frozen, layers=case.blocks(model))
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            yield _step(case.loss(model, batch), optimizer)


def by_hand(case: Case) -> Iterator[float]:
    model = case.build()
    optimizer, loader = _optimizer(model), _loader(case, Numbered(case.items))
    freeze.apply(model, case.num_frozen, layers=case.blocks(model))
    cache: dict[int, Tensor] = {}
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            places = batch.pop("index").tolist()
            if places[0] not in cache:
                with torch.no_grad():
                    hidden = case.below(model, batch, case.num_frozen)
                cache.update(zip(places, hidden, strict=True))
            else:
                hidden = torch.stack([cache[place] for place in places])
            yield _step(case.above(model, hidden, batch, case.num_frozen), optimizer)


def attached(case: Case, num_epochs: int, **settings: Any) -> Iterator[float]:
    model = case.build()
    optimizer, loader = _optimizer(model), _loader(case, case.items)
    with attach(model, freeze=case.num_frozen, **settings) as cached:
        for _ in range(num_epochs):
            for batch in cached.epoch(loader):
                yield _step(case.loss(model, batch), optimizer)


def _step(loss: Tensor, optimizer: torch.optim.Optimizer) -> float:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@dataclass
class Contestant:
    """Take a loop's steps one by one, and note losses and seconds."""

    steps: Iterator[float]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        self.seconds.append(seconds_of(lambda: self.losses.append(next(self.steps))))


def run(case: Case, folder: Path) -> dict[str, np.ndarray]:
    """Run all loops in turn; return the seconds of their steps, but each epoch's first."""
    kept = {"cache_folder": folder, "cache_keep": True}
    loops = {
        "plain": Contestant(plain(case)),
        "by_hand": Contestant(by_hand(case)),
        "ours": Contestant(attached(case, NUM_EPOCHS)),
        "kept": Contestant(attached(case, NUM_EPOCHS, **kept)),
    }
    second = Contestant(attached(case, 1, **kept))
    # Closed at the end: a loop that is left holds its rows.
    with ExitStack() as ended:
        for one in (*loops.values(), second):
            ended.callback(one.steps.close)  # type: ignore[attr-defined]
        for number in range(NUM_STEPS * NUM_EPOCHS):
            last = number - NUM_STEPS * (NUM_EPOCHS - 1)
            for name in np.roll([*loops], number):
                loops[str(name)].step()
            if last >= 0:
                second.step()
    for name, one in loops.items():
        _compare(case, name, one.losses, loops["plain"].losses)
    _compare(case, "second", second.losses, loops["plain"].losses[:NUM_STEPS])
    return {name: np.array(one.seconds) for name, one in {**loops, "second": second}.items()}


def _compare(case: Case, name: str, losses: list[float], plainly: list[float]) -> None:
    if not np.allclose(losses, plainly, rtol=1e-4, atol=0):
        raise ResultsDifferError(f"{case.name}: {name} has losses {losses}, plain has {plainly}")


def ratios(seconds: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the median ratios; an epoch's first step, which also looks around, counts to none."""
    fill = slice(1, NUM_STEPS)
    warm = [n for n in range(NUM_STEPS, NUM_STEPS * NUM_EPOCHS) if n % NUM_STEPS]
    last = slice(NUM_STEPS * (NUM_EPOCHS - 1) + 1, None)

    def ratio(one: np.ndarray, other: np.ndarray) -> float:
        return round(bootstrap(one / other).median, 3)

    return {
        "fill_over_by_hand": ratio(seconds["ours"][fill], seconds["by_hand"][fill]),
        "kept_fill_over_by_hand": ratio(seconds["kept"][fill], seconds["by_hand"][fill]),
        "warm_over_by_hand": ratio(seconds["ours"][warm], seconds["by_hand"][warm]),
        "plain_over_fill": ratio(seconds["plain"][fill], seconds["ours"][fill]),
        "plain_over_warm": ratio(seconds["plain"][warm], seconds["ours"][warm]),
        "second_over_kept_warm": ratio(seconds["second"][fill], seconds["kept"][last]),
    }


def texts(num: int, length: int, words: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, words, (num, length), generator=generator)
    return [
        {"input_ids": one, "attention_mask": torch.ones_like(one), "labels": one} for one in ids
    ]


def minilm() -> Case:
    library: Any = transformers
    config = library.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip

    def build() -> nn.Module:
        torch.manual_seed(0)
        return library.BertForSequenceClassification(config)

    def below(model: Any, batch: Mapping[str, Tensor], depth: int) -> Tensor:
        hidden = model.bert.embeddings(batch["input_ids"])
        for block in model.bert.encoder.layer[:depth]:
            hidden = block(hidden)
        return hidden

    def above(model: Any, hidden: Tensor, batch: Mapping[str, Tensor], depth: int) -> Tensor:
        for block in model.bert.encoder.layer[depth:]:
            hidden = block(hidden)
        return F.cross_entropy(model.classifier(model.bert.pooler(hidden)), batch["labels"])

    items = texts(NUM_STEPS * 16, 64, 30000)
    items = [{**one, "labels": torch.tensor(i % 2)} for i, one in enumerate(items)]
    return Case(
        "minilm", build, items, 16, 4, lambda m: m.bert.encoder.layer, below, above,
        lambda model, batch: model(**batch).loss,
    )  # fmt: skip


def vit() -> Case:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return timm.create_model("vit_small_patch16_224", img_size=112, num_classes=10)

    def below(model: Any, batch: Mapping[str, Tensor], depth: int) -> Tensor:
        hidden = model.norm_pre(model._pos_embed(model.patch_embed(batch["x"])))
        return model.blocks[:depth](hidden)

    def above(model: Any, hidden: Tensor, batch: Mapping[str, Tensor], depth: int) -> Tensor:
        out = model.forward_head(model.norm(model.blocks[depth:](hidden)))
        return F.cross_entropy(out, batch["y"])

    generator = torch.Generator().manual_seed(1)
    images = torch.randn(NUM_STEPS * 16, 3, 112, 112, generator=generator)
    items = [{"x": image, "y": torch.tensor(i % 10)} for i, image in enumerate(images)]
    return Case(
        "vit", build, items, 16, 8, lambda m: m.blocks, below, above,
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
    )  # fmt: skip


def gpt2() -> Case:
    library: Any = transformers
    config = library.GPT2Config(
        vocab_size=5000, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip

    def build() -> nn.Module:
        torch.manual_seed(0)
        return library.GPT2LMHeadModel(config)

    def below(model: Any, batch: Mapping[str, Tensor], depth: int) -> Tensor:
        body = model.transformer
        hidden = body.wte(batch["input_ids"]) + body.wpe.weight[: batch["input_ids"].shape[1]]
        for block in body.h[:depth]:
            hidden = block(hidden)
        return hidden

    def above(model: Any, hidden: Tensor, batch: Mapping[str, Tensor], depth: int) -> Tensor:
        for block in model.transformer.h[depth:]:
            hidden = block(hidden)
        logits = model.lm_head(model.transformer.ln_f(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    return Case(
        "gpt2", build, texts(NUM_STEPS * 8, 64, 5000), 8, 8, lambda m: m.transformer.h, below,
        above, lambda model, batch: model(**batch).loss,
    )  # fmt: skip


CASES = {"minilm": minilm, "vit": vit, "gpt2": gpt2}


def main(names: list[str]) -> int:
    worst = 0
    for name in names or [*CASES]:
        with tempfile.TemporaryDirectory() as folder:
            found = ratios(run(CASES[name](), Path(folder)))
        worst = max(worst, conclude({"case": name, **found}, BARS))
    return worst


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Samples that a collator joins along their tokens have rows, each its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import freeze
from pipetransformer import attach
from tests.helpers.marks import slow

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16, "use_cache": False,
    "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
FREEZES = (0, 1, 2, 3, 3)


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options}))


def qwen(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **options}))


class Texts:
    """Hold made-up texts of unequal lengths."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        own = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(5, 40, (4 + index % 5,), generator=own).tolist()}


def note_runs(model: nn.Module) -> list[int]:
    """Return a list of the blocks that run from now on."""
    runs: list[int] = []
    for index, block in enumerate(model.get_submodule("model.layers").children()):
        run = block.mlp.forward

        def noting(*args: Any, _run: Any = run, _index: int = index, **kwargs: Any) -> Any:
            runs.append(_index)
            return _run(*args, **kwargs)

        block.mlp.forward = noting
    return runs


def train(
    model: nn.Module, epochs: Callable[[int, DataLoader[Any]], Iterator[Any]], collate: Any
) -> list[float]:
    """Train five epochs of three batches; return the losses."""
    torch.manual_seed(1)
    loader: DataLoader[Any] = DataLoader(
        Texts(),  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
        collate_fn=collate,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for epoch in range(len(FREEZES)):
        for batch in epochs(epoch, loader):
            loss = model(**batch).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("build", [llama, slow(qwen)])
@pytest.mark.parametrize(
    "options",
    [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}],
    ids=["positions", "lengths, too"],
)
def test_losses_and_weights_are_those_without_rows(
    build: Callable[..., nn.Module], options: dict[str, Any]
) -> None:
    collate = DataCollatorWithFlattening(return_tensors="pt", **options)
    models = [build() for _ in range(2)]

    def by_hand(epoch: int, loader: DataLoader[Any]) -> Iterator[Any]:
        freeze.apply(models[0], FREEZES[epoch])
        yield from loader

    expected = train(models[0], by_hand, collate)
    last = list[int]()
    with attach(models[1], freeze=[*FREEZES]) as cached:

        def by_rows(epoch: int, loader: DataLoader[Any]) -> Iterator[Any]:
            last[:] = [len(runs)]
            yield from cached.epoch(loader)

        runs = note_runs(models[1])
        found = train(models[1], by_rows, collate)
        assert (cached.stats.hits, cached.stats.misses) == (12, 0)
    assert {*runs[last[0] :]} == {3}
    assert found == pytest.approx(expected, rel=1e-6)
    weights, others = (one.state_dict() for one in models)
    gaps = {name: float((one - others[name]).abs().max()) for name, one in weights.items()}
    assert max(gaps.values()) < 1e-6, gaps


def without_positions(texts: Any) -> dict[str, Tensor]:
    return DataCollatorWithFlattening(return_tensors="pt", return_position_ids=False)(texts)


def with_a_gap(texts: Any) -> dict[str, Tensor]:
    batch = DataCollatorWithFlattening(return_tensors="pt")(texts)
    return {name: nn.functional.pad(one, (0, -one.shape[1] % 8)) for name, one in batch.items()}


def turned_by_three(texts: Any) -> dict[str, Tensor]:
    own = texts[::-1] if len(texts) == 3 else texts
    return DataCollatorWithFlattening(return_tensors="pt")(own)


@pytest.mark.parametrize(
    ("collate", "options", "settings", "why"),
    [
        (without_positions, {}, {}, "have it return position_ids"),
        (with_a_gap, {}, {}, "with nothing between or behind them"),
        (turned_by_three, {}, {}, r"a later batch has other \['input_ids', 'position_ids'\]"),
        (turned_by_three, {"use_cache": True}, {}, "set model.config.use_cache = False"),
        (turned_by_three, {}, {"parts": ["model.layers.0"]}, "nothing in it has a row for each"),
    ],
)
def test_what_would_mix_samples_is_refused(
    collate: Callable[..., Any], options: Any, settings: Any, why: str
) -> None:
    loader: DataLoader[Any] = DataLoader(Texts(), 3, collate_fn=collate)  # type: ignore[arg-type]
    with attach(llama(**options), **{"freeze": 1, **settings}) as cached:
        with pytest.raises(ValueError, match=why):
            list(cached.epoch(loader))


def test_samples_that_see_each_other_have_no_rows(caplog: pytest.LogCaptureFixture) -> None:
    def collate(texts: Any) -> dict[str, Tensor]:
        # With a mask the model does not look where positions begin anew.
        batch = DataCollatorWithFlattening(return_tensors="pt")(texts)
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    loader: DataLoader[Any] = DataLoader(Texts(), 4, collate_fn=collate)  # type: ignore[arg-type]
    model = llama()
    expected = [model(**batch).loss.item() for batch in loader]
    with attach(model, freeze=1) as cached:
        found = [model(**batch).loss.item() for batch in cached.epoch(loader)]
    assert found == expected
    assert "depends on the other samples of its batch" in caplog.text


def test_kept_rows_and_evaluations_are_served(tmp_path: Path) -> None:
    collate = DataCollatorWithFlattening(return_tensors="pt")
    loaders = [DataLoader(Texts(), size, collate_fn=collate) for size in (4, 5)]  # type: ignore[arg-type,var-annotated]
    model = llama()
    freeze.apply(model, 2)
    expected = [model(**batch).loss.item() for loader in loaders for batch in loader]
    for run in range(2):
        runs = note_runs(model := llama())
        settings = {"cache_keep": True, "cache_folder": tmp_path}
        with attach(model, freeze=2, **settings) as cached:
            found = [model(**batch).loss.item() for batch in cached.epoch(loaders[0])]
            assert (cached.stats.hits == 12) is (run == 1)
            for _ in range(2):
                runs.clear()
                own = [model(**batch).loss.item() for batch in cached.evaluation(loaders[1])]
        assert found + own == pytest.approx(expected, rel=1e-6)
        assert {*runs} == {2, 3}

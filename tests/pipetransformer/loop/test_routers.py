"""A mixture of experts trains from rows with its routers' loss, as without rows.

The loss reads the logits of all routers, and those of frozen blocks do not run: rows hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe import modeling_qwen3_moe

import freeze
from pipetransformer import attach
from tests.helpers.marks import slow

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 16, "num_experts_per_tok": 2,
    "max_position_embeddings": 32, "router_aux_loss_coef": 0.5, "attn_implementation": "eager",
    "output_router_logits": True, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip

KINDS: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "qwen3": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "head_dim": 8}),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 4}),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, {"num_local_experts": 4, "head_dim": 8}),
    # Its first and third blocks have no router.
    "some blocks": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 2,
        },
    ),
}
FREEZES = (0, 1, 2, 3, 3)


def build(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config, model, own = KINDS[kind]
    return model(config(**{**SIZES, **own, **options}))


class Texts:
    """Hold made-up texts of unequal lengths."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> list[int]:
        own = torch.Generator().manual_seed(index)
        return torch.randint(5, 40, (4 + index % 5,), generator=own).tolist()


def padded(texts: Sequence[list[int]], *, on_left: bool = False) -> dict[str, Tensor]:
    """Return a batch of padded texts; on the left up to one length, as other rows are not kept."""
    most = 8 if on_left else max(map(len, texts))
    entries: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for text in texts:
        gap = most - len(text)
        for name, own, other in (
            ("input_ids", text, 0),
            ("attention_mask", [1] * len(text), 0),
            ("labels", text, -100),
        ):
            filling = [other] * gap
            entries[name].append(filling + own if on_left else own + filling)
    return {name: torch.tensor(rows) for name, rows in entries.items()}


def padded_left(texts: Sequence[list[int]]) -> dict[str, Tensor]:
    return padded(texts, on_left=True)


def equal(texts: Sequence[list[int]]) -> dict[str, Tensor]:
    """Return a batch of texts of one length, without a mask."""
    ids = torch.tensor([text[:4] for text in texts])
    return {"input_ids": ids, "labels": ids}


def note_runs(model: nn.Module) -> list[int]:
    """Return a list of the blocks whose experts run from now on."""
    runs: list[int] = []
    for index, block in enumerate(model.get_submodule("model.layers")):  # type: ignore[arg-type]
        inner = block.mlp.experts if hasattr(block.mlp, "experts") else block.mlp
        run = inner.forward

        def noting(*args: Any, _run: Any = run, _index: int = index, **kwargs: Any) -> Any:
            runs.append(_index)
            return _run(*args, **kwargs)

        inner.forward = noting
    return runs


def train(
    model: nn.Module,
    epochs: Callable[[int, DataLoader[Any]], Iterator[Any]],
    collate: Callable[..., Any],
    *,
    dtype: torch.dtype | None = None,
    **given: Any,
) -> list[float]:
    """Train five epochs of three batches, with an update every second one; return the losses."""
    torch.manual_seed(1)
    loader: DataLoader[Any] = DataLoader(
        Texts(),
        batch_size=4,
        shuffle=True,
        collate_fn=collate,  # type: ignore[arg-type]
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses, num = [], 0
    for epoch in range(len(FREEZES)):
        for batch in epochs(epoch, loader):
            with torch.autocast("cpu", dtype) if dtype else nullcontext():
                answer = model(**batch, **given)
            losses.append(answer.loss.item())
            assert answer.aux_loss is not None
            answer.loss.backward()
            num += 1
            if num % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return losses


def train_both(kind: str, collate: Callable[..., Any], **how: Any) -> None:
    """Train with and without rows, and compare losses, weights, and what ran."""
    options = how.pop("options", {})
    models = [build(kind, **options) for _ in range(2)]

    def by_hand(epoch: int, loader: DataLoader[Any]) -> Iterator[Any]:
        freeze.apply(models[0], FREEZES[epoch])
        yield from loader

    expected = train(models[0], by_hand, collate, **how)
    precision = {"precision": "bf16"} if how.get("dtype") else {}
    runs, last = list[int](), list[int]()
    with attach(models[1], freeze=[*FREEZES], **precision) as cached:

        def by_rows(epoch: int, loader: DataLoader[Any]) -> Iterator[Any]:
            last[:] = [len(runs)]
            yield from cached.epoch(loader)

        runs = note_runs(models[1])
        found = train(models[1], by_rows, collate, **how)
        assert (cached.stats.hits, cached.stats.misses) == (12, 0)
    assert {*runs[last[0] :]} == {3}
    # The order of a sum changes the last digits, as padding has other states.
    assert found == pytest.approx(expected, rel=1e-6)
    weights, others = (one.state_dict() for one in models)
    gaps = {name: float((one - others[name]).abs().max()) for name, one in weights.items()}
    assert max(gaps.values()) < 1e-6, gaps


@pytest.mark.parametrize(
    ("kind", "collate"),
    [
        ("qwen3", padded),
        slow("qwen3", padded_left),
        ("some blocks", padded),
        slow("qwen3", equal),
        *(slow(kind, padded) for kind in ("mixtral", "olmoe", "gpt_oss")),
        *(slow(kind, padded_left) for kind in ("mixtral", "olmoe", "gpt_oss")),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_losses_and_weights_are_those_without_rows(kind: str, collate: Callable[..., Any]) -> None:
    train_both(kind, collate)


@pytest.mark.parametrize("kind", [slow("qwen3"), slow("mixtral"), slow("olmoe"), slow("gpt_oss")])
def test_losses_and_weights_are_those_without_rows_in_autocast(kind: str) -> None:
    train_both(kind, padded, dtype=torch.bfloat16)


def test_a_loop_may_ask_for_routers_logits_in_each_forward() -> None:
    train_both("qwen3", padded, options={"output_router_logits": False}, output_router_logits=True)


@pytest.mark.parametrize("is_on", [True, slow(False)])
def test_the_setting_may_change_between_epochs(is_on: bool) -> None:
    losses = []
    for settings in ({"cache": False}, {}):
        model: Any = build("qwen3", output_router_logits=not is_on)
        loader = DataLoader(Texts(), 4, collate_fn=padded)  # type: ignore[arg-type,var-annotated]
        own: list[float] = []
        with attach(model, freeze=2, **settings) as cached:
            for epoch in range(4):
                model.config.output_router_logits = is_on if epoch > 1 else not is_on
                own += [model(**batch).loss.item() for batch in cached.epoch(loader)]
        losses.append(own)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[1][0] != pytest.approx(losses[1][-3], rel=1e-3)


def of_padding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_qwen3_moe.load_balancing_loss_func
    monkeypatch.setattr(
        modeling_qwen3_moe, "load_balancing_loss_func", lambda *given: plain(*given[:3])
    )


def of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    run = modeling_qwen3_moe.Qwen3MoeModel.forward

    def copying(*args: Any, **kwargs: Any) -> Any:
        answer = run(*args, **kwargs)
        if answer.get("router_logits"):
            answer["router_logits"] = tuple(one.clone() for one in answer["router_logits"])
        return answer

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeModel, "forward", copying)


@pytest.mark.parametrize(
    ("change", "why"),
    [(of_padding_too, "also for padding"), (of_copies, "Which modules these come from")],
)
def test_another_loss_of_routers_is_refused(
    change: Callable[..., None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    model = build("qwen3")
    loader = DataLoader(Texts(), 4, collate_fn=padded)  # type: ignore[arg-type,var-annotated]
    with attach(model, freeze=1) as cached, pytest.raises(ValueError, match=why):
        next(iter(cached.epoch(loader)))

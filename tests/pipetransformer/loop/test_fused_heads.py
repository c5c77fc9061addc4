"""A forward that is set on a model as Liger does, whose loss needs no logits, trains from rows."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from freeze import FreezeSchedule
from freeze import apply as freeze_in_place
from pipetransformer import FreezeCallback, Trainer, attach
from tests.helpers.any_models import BATCH_SIZE, KINDS, build, data, sgd
from tests.helpers.measured import freely, measuring
from tests.pipetransformer.loop.test_cached_loop import Samples
from tests.pipetransformer.loop.test_callbacks import Training, assert_losses_and_weights

LLAMA = KINDS["llama"]


class _FusedSum(torch.autograd.Function):
    """Sum the losses of tokens; gradients are computed beside them, by hand."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
        counts = (words != -100)[:, None]
        chosen = nn.functional.one_hot(words.clamp(0), len(weight)).to(hidden)
        chances = (hidden @ weight.T).log_softmax(1)
        slope = (chances.exp() - chosen) * counts
        ctx.save_for_backward(slope @ weight, slope.T @ hidden)
        return -(chances * chosen * counts).sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * factor, by_weight * factor, None


def fused_forward(
    self: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    skip_logits: bool | None = None,
    **others: Any,
) -> CausalLMOutputWithPast:
    """Return a loss without logits in training, or where it is asked to."""
    skips = self.training and labels is not None if skip_logits is None else skip_logits
    if skips and labels is None:
        raise ValueError("skip_logits is True, but there are no labels")
    hidden = self.model(input_ids, attention_mask=attention_mask, use_cache=False)[0]
    if not skips or labels is None:
        logits = self.lm_head(hidden)
        loss = None if labels is None else self.loss_function(
            logits=logits, labels=labels, vocab_size=self.config.vocab_size, **others
        )  # fmt: skip
        return CausalLMOutputWithPast(loss=loss, logits=logits)
    words = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    total = _FusedSum.apply(hidden.flatten(0, 1), self.lm_head.weight, words)
    num = others.get("num_items_in_batch")
    return CausalLMOutputWithPast(loss=total / ((words != -100).sum() if num is None else num))


def fused_norm(self: Any, hidden: Tensor) -> Tensor:
    scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (hidden * scale)


def fused(model: Any = None) -> Any:
    """Give a Llama's modules other forwards, on the objects."""
    model = build(LLAMA) if model is None else model
    model.forward = MethodType(fused_forward, model)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = MethodType(fused_norm, module)
    return model


def test_attach_serves_it(tmp_path: Path) -> None:
    found = list[tuple[list[float], dict[str, Tensor]]]()
    for folder in (None, tmp_path):
        model, losses = fused(), list[float]()
        loader = torch.utils.data.DataLoader(Samples(dict(data(LLAMA).tensors)), batch_size=4)
        optimizer = sgd([*model.named_parameters()])
        cached = attach(model, freeze=2, cache_folder=folder) if folder else None
        if cached is None:
            freeze_in_place(model, 2, layers=list(model.model.layers))
        for _ in range(3):
            for batch in cached.epoch(loader) if cached else loader:
                answer = model(**batch)
                assert answer.logits is None
                answer.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(answer.loss.item())
        if cached is not None:
            assert cached.stats.hits == len(loader.dataset)  # type: ignore[arg-type]
            cached.close()
        found.append((losses, model.state_dict()))
    (plain, expected), (ours, weights) = found
    assert ours == pytest.approx(plain, rel=1e-9, abs=0)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_trainer_serves_it() -> None:
    """Its last block was "left out": copies around blocks ran the forward bound to the model."""
    found = list[dict[str, Tensor]]()
    for make, cache in ((fused, True), (fused, False), (lambda: build(LLAMA), False)):
        with (
            measuring(freely),
            Trainer(
                make(), data(LLAMA), optimizer=sgd, progress=False, epochs=3, cache=cache,
                freeze=FreezeSchedule([1, 2, 2]), global_batch_size=BATCH_SIZE,
            ) as trainer,
        ):  # fmt: skip
            trainer.fit()
            assert (trainer.report.cache_hits > 0) == cache
            found.append({n: one.clone() for n, one in trainer.state_dict().items()})
    for other, rounding in ((found[1], 1e-9), (found[2], LLAMA.rounding)):
        for name, tensor in found[0].items():
            torch.testing.assert_close(tensor, other[name], rtol=rounding, atol=rounding)


@pytest.mark.slow
def test_transformers_trainer_serves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda model, _: fused(model))
    plain, ours = (Training(tmp_path / name, LLAMA) for name in ("plain", "ours"))
    settings = {"use_liger_kernel": True, "eval_strategy": "epoch"}
    plain.train(FreezeCallback(2, cache=False), **settings)
    callback = FreezeCallback(2, cache_folder=tmp_path)
    ours.train(callback, **settings)
    assert_losses_and_weights(ours, plain)
    assert callback.stats.hits > 0

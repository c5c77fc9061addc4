"""Losses over many words need no logits of all tokens, and come to the same gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from autopipe.loss import LossValue, head_of
from pipetransformer import FreezeSchedule, LayeredModel, Trainer
from pipetransformer.model import present
from pipetransformer.model.losses import UnreadLogits, WordHead
from pipetransformer.model.losses.transformers_losses import causal_loss
from tests.helpers.any_models import BATCH_SIZE, KINDS, Kind, build, data, sgd
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.pool import Pool

word_head = sys.modules[WordHead.__module__]
"""The module: its package has the function of that name."""

_LLAMA = ("model.layers", ("model.embed_tokens",), KINDS["llama"].options)


def llama_like(name: str, **options: Any) -> Kind:
    blocks, bottom, own = _LLAMA
    return Kind(name, blocks, bottom, {**own, **options})


HEADS = {
    "gpt2": (KINDS["gpt2"], 1.0, None),  # tied
    "llama": (KINDS["llama"], 1.0, None),
    "phi": (KINDS["phi"], 1.0, None),  # with a bias
    "gemma2": (llama_like("Gemma2ForCausalLM", final_logit_softcapping=2.0), 1.0, 2.0),
    "gemma3": (llama_like("Gemma3ForCausalLM", final_logit_softcapping=2.0), 1.0, 2.0),
    "recurrent_gemma": (llama_like("RecurrentGemmaForCausalLM"), 1.0, 30.0),
    "granite": (llama_like("GraniteForCausalLM", logits_scaling=3.0), 1 / 3, None),
    "hyperclovax": (llama_like("HyperCLOVAXForCausalLM", logits_scaling=3.0), 3.0, None),
    "cohere": (llama_like("CohereForCausalLM", logit_scale=0.3), 0.3, None),
}
"""A family, and what it does with the output of its last layer."""


@contextmanager
def small_chunks(*, least_words: int = 1) -> Iterator[None]:
    """Take heads of few words for many, three tokens at a time."""
    with (
        patch.object(word_head, "LEAST_WORDS", least_words),
        patch.object(word_head, "_CHUNK_BYTES_ON_CPU", 1),
        patch.object(word_head, "_LEAST_TOKENS", 3),
    ):
        yield


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_chunks():
        yield


def presented(model: Any, batch: dict[str, Tensor] | None = None) -> LayeredModel:
    return present(model, batch or first_samples())


def first_samples(kind: Kind = KINDS["llama"]) -> dict[str, Tensor]:
    return {name: entry[:4] for name, entry in data(kind).tensors.items()}


def gradients(model: nn.Module, value: LossValue) -> dict[str, Tensor]:
    assert isinstance(value, tuple)
    model.zero_grad(set_to_none=True)
    (value[0] / value[1]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_losses(
    layered: LayeredModel, batch: dict[str, Tensor], *, smoothing: float = 0.0, late: bool = False
) -> None:
    """Compare the loss and every gradient with those by all logits, in float64."""
    model, target, loss = layered.model, layered.targets_of(batch), layered.loss_fn
    if smoothing:
        loss = loss.smoothed(smoothing)  # type: ignore[union-attr]
    assert loss is not None and layered.words is not None
    plain = loss(layered.run(batch), target)
    theirs = gradients(model, plain)
    hidden = layered.run(batch, headless=True)
    ours_of = loss(UnreadLogits(hidden, layered.words, in_backward=late), target)
    ours = gradients(model, ours_of)
    torch.testing.assert_close(ours_of, plain, rtol=1e-12, atol=0)
    assert ours.keys() == theirs.keys() and ours
    for name, gradient in ours.items():
        # A key's bias has a gradient that is 0 but for rounding.
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-9, atol=1e-14, msg=name)
    with torch.no_grad():
        seen = loss(UnreadLogits(hidden.detach(), layered.words), target)
    torch.testing.assert_close(seen, plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("late", [False, True], ids=["in the forward", "in the backward"])
@pytest.mark.parametrize("name", HEADS)
def test_every_gradient_is_that_by_all_logits(name: str, late: bool) -> None:
    kind, scale, cap = HEADS[name]
    model, batch = build(kind), first_samples(kind)
    layered = presented(model, batch)
    assert layered.words == WordHead(model.get_output_embeddings(), scale, cap)
    assert_equal_losses(layered, batch, late=late)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_weights_in_bfloat16_get_gradients_in_it_of_sums_in_float32(name: str) -> None:
    kind, scale, cap = HEADS[name]
    batch, wide = first_samples(kind), build(kind)
    # Of the embedding, too, where they are tied.
    head = next(n for n, p in wide.named_parameters() if p is wide.get_output_embeddings().weight)
    exact = gradients(wide, causal_loss(wide(**batch).logits, batch["labels"]))[head]
    layered = presented(build(kind).bfloat16(), batch)
    model, words, loss = layered.model, layered.words, layered.loss_fn
    assert words == WordHead(model.get_output_embeddings(), scale, cap) and loss is not None
    theirs = gradients(model, loss(layered.run(batch), batch["labels"]))
    hidden = layered.run(batch, headless=True)
    value = loss(UnreadLogits(hidden, words), batch["labels"])
    ours = gradients(model, value)
    assert head_of(value).dtype == torch.float32 and ours.keys() == theirs.keys()
    assert {one.dtype for one in ours.values()} == {torch.bfloat16}
    ours_off, theirs_off = ((g[head] - exact).norm().item() for g in (ours, theirs))
    assert ours_off <= 1.2 * theirs_off
    for key, gradient in ours.items():
        gap = (gradient - theirs[key]).double().norm()
        assert gap <= 3e-2 * theirs[key].double().norm() + 1e-6, key


def test_smoothed_labels_and_virtual_tokens_count_as_with_all_logits() -> None:
    batch = first_samples()
    assert_equal_losses(presented(build(KINDS["llama"]), batch), batch, smoothing=0.1)
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    prompted = get_peft_model(build(KINDS["llama"]), config).double()
    assert_equal_losses(presented(prompted, batch), batch)


def test_a_batch_without_a_target_has_no_loss_and_no_gradient() -> None:
    layered, batch = presented(build(KINDS["llama"])), first_samples()
    hidden, words = layered.run(batch, headless=True), layered.words
    assert words is not None
    nothing = torch.full_like(batch["labels"], -100)
    total, count = causal_loss(UnreadLogits(hidden, words), nothing)
    total.backward()
    assert total.item() == count.item() == 0
    assert all(not p.grad.any() for p in layered.model.parameters() if p.grad is not None)


def test_a_frozen_head_computes_no_gradient_of_its_weights() -> None:
    model, batch = build(KINDS["llama"]), first_samples()
    layered = presented(model, batch)
    model.lm_head.weight.requires_grad_(False)
    assert_equal_losses(layered, batch)
    assert layered.words is not None
    linear = nn.Linear(64, 5000, bias=False).requires_grad_(False)
    hidden = torch.randn(1, 6, 64, requires_grad=True)
    words = torch.zeros(1, 6, dtype=torch.long)
    with LiveBytes([]) as live:
        UnreadLogits(hidden, WordHead(linear)).summed_losses(words).backward()
    # The weights, and three tokens' logits; a gradient would take as much as the weights.
    assert hidden.grad is not None and live.peak < 1.5 * linear.weight.nbytes


def lora_head() -> nn.Module:
    """Adapt the head itself: its second factor is 0 at first."""
    return get_peft_model(
        build(KINDS["llama"]), LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    )


class Beside(transformers.LlamaForCausalLM):
    """Add what is 0 at first, and trains."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.beside = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("heat", torch.ones(()))

    def forward(self, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
        hidden = self.model(input_ids, **more).last_hidden_state
        hidden = hidden + 0 * self.beside.weight.detach().sum()  # What is read of none is refused.
        logits = self._more(self.lm_head(hidden), hidden)
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)

    def _more(self, logits: Tensor, hidden: Tensor) -> Tensor:
        return logits + self.beside(hidden)


class Dropped(Beside):
    """Drop logits, in training alone."""

    def _more(self, logits: Tensor, hidden: Tensor) -> Tensor:
        return F.dropout(logits, 0.5, self.training)


class Squared(Beside):
    """Do what no configuration says."""

    def _more(self, logits: Tensor, hidden: Tensor) -> Tensor:
        return logits * logits.abs().clamp(min=1)


class Heated(Beside):
    """Multiply by what is 1 at first, and may be set later."""

    def _more(self, logits: Tensor, hidden: Tensor) -> Tensor:
        return logits * self.heat


class Plain(Beside):
    def _more(self, logits: Tensor, hidden: Tensor) -> Tensor:
        return logits


def of_class(kind: type[Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = kind(build(KINDS["llama"]).config).double()
    model.beside.weight.data.zero_()
    return model


def few_words() -> nn.Module:
    word_head.LEAST_WORDS = 41
    return build(KINDS["llama"])


@pytest.mark.parametrize(
    "make",
    [lora_head, partial(of_class, Beside), partial(of_class, Dropped),
     partial(of_class, Squared), partial(of_class, Heated), few_words],
    ids=["adapted", "beside it", "dropout", "unknown", "by a buffer", "few words"],
)  # fmt: skip
def test_a_head_that_is_not_known_to_be_plain_keeps_its_logits(
    make: Callable[[], nn.Module],
) -> None:
    assert presented(make()).words is None
    assert presented(of_class(Plain)).words is not None or make is few_words


def test_sums_are_in_float32_where_autocast_computes_in_less() -> None:
    torch.manual_seed(0)
    linear, target = nn.Linear(16, 300), torch.randint(0, 300, (2, 40))
    hidden = torch.randn(2, 40, 16, requires_grad=True)
    inputs = (hidden, *linear.parameters())

    def by_logits(dtype: torch.dtype | None) -> list[Tensor]:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            logits = linear(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="sum")
        return [loss, *torch.autograd.grad(loss, inputs)]

    exact, theirs = by_logits(None), by_logits(torch.bfloat16)
    for late in (False, True):
        unread = UnreadLogits(hidden, WordHead(linear), torch.bfloat16, late)
        loss = unread.summed_losses(target)
        for true, one, other in zip(
            exact, [loss, *torch.autograd.grad(loss, inputs)], theirs, strict=True
        ):
            assert one.dtype == torch.float32
            # As near as with all logits, whose gradients are rounded once more.
            assert (one - true).norm().item() <= 1.2 * (other - true).norm().item()


@pytest.mark.parametrize("num_tokens", [256, slow(2048)])
def test_peak_memory_at_128k_words_falls_to_an_eighth(num_tokens: int) -> None:
    # As a chunk's least tokens are to an H100's, on which a batch has 16,384.
    tokens = num_tokens // 16
    with patch.object(word_head, "_LEAST_TOKENS", tokens):
        linear, words = nn.Linear(4, 1 << 17, bias=False), torch.arange(num_tokens)[None]
        hidden = torch.randn(1, num_tokens, 4, requires_grad=True)
        peaks = []
        for output in (UnreadLogits(hidden, WordHead(linear)), None):
            linear.weight.grad = hidden.grad = None
            with LiveBytes([]) as live:
                total, count = causal_loss(linear(hidden) if output is None else output, words)
                (total / count).backward()
            peaks.append(live.peak)
    ours, theirs = peaks
    assert ours <= theirs / 8


_GPT2 = KINDS["gpt2"]
LARGE = Kind(_GPT2.name, _GPT2.blocks, _GPT2.bottom, {**_GPT2.options, "vocab_size": 4500})
"""Its head has many words by itself."""


@measuring(never)
def train(name: str, least_words: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train from a freeze to a thaw; return losses, weights, and calls of the loss in chunks."""
    calls, own = [], UnreadLogits.summed_losses

    def counted(self: UnreadLogits, *args: Any, **options: Any) -> Tensor:
        calls.append(self.in_backward)
        return own(self, *args, **options)

    kind = LARGE if name == "gpt2" else KINDS[name]
    entries, losses, model = data(kind), [], build(kind)
    if "precision" in settings:
        model = model.float()
    with (
        small_chunks(least_words=least_words),
        patch.object(UnreadLogits, "summed_losses", counted),
        Trainer(
            model, entries, eval_dataset=entries, optimizer=sgd,
            freeze=FreezeSchedule((0, 1, 0)), epochs=3, global_batch_size=BATCH_SIZE,
            progress=False, **settings,
        ) as trainer,
    ):  # fmt: skip
        while not trainer.is_over:
            losses.append(trainer.step().loss)
        evaluated = trainer.evaluate()
        return {
            "losses": losses,
            "evaluated": evaluated,
            "weights": {n: t.clone() for n, t in trainer.state_dict().items()},
            "calls": calls,
        }


def assert_trains_alike(ours: dict[str, Any], theirs: dict[str, Any], rounding: float) -> None:
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=rounding)
    assert ours["evaluated"] == pytest.approx(theirs["evaluated"], rel=rounding)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, tensor in ours["weights"].items():
        allowed = rounding * (1e-2 + float(tensor.abs().max()))
        assert float((tensor - theirs["weights"][name]).abs().max()) <= allowed, name


LEAST, NEVER = {"gpt2": word_head.LEAST_WORDS, "llama": 1}, 10**9


@pytest.mark.parametrize(
    ("name", "settings", "rounding"),
    [
        slow("llama", {}, 5e-5),
        ("gpt2", {"schedule": "gpipe", "tied_weights": "train"}, 1e-9),
        slow("gpt2", {"tied_weights": "freeze", "label_smoothing": 0.1}, 1e-9),
        slow("gpt2", {"tied_weights": "untie", "activation_checkpointing": True}, 1e-9),
        slow("llama", {"precision": "bf16"}, 2e-2),
        slow("llama", {"precision": "fp16"}, 2e-2),
    ],
)
def test_a_run_trains_as_with_all_logits(
    name: str, settings: dict[str, Any], rounding: float
) -> None:
    settings = {"pipeline_length": 1, "micro_batches": 2, **settings}
    ours, theirs = train(name, LEAST[name], settings), train(name, NEVER, settings)
    assert ours["calls"] and not theirs["calls"]
    # Behind the first call, which was compared with the model's own loss before the start.
    in_backward = settings.get("schedule") == "gpipe" or settings.get("precision") == "fp16"
    assert any(ours["calls"][1:]) == in_backward
    assert_trains_alike(ours, theirs, rounding)


@pytest.mark.parametrize(
    ("name", "schedule", "tied", "rounding"),
    [
        ("gpt2", "1f1b", "train", 1e-9),
        slow("gpt2", "gpipe", "freeze", 1e-9),
        slow("llama", "gpipe", "train", 5e-5),
        slow("llama", "1f1b", "train", 5e-5),
    ],
)
def test_two_stages_train_as_with_all_logits(
    two_ranks: Pool, name: str, schedule: str, tied: str, rounding: float
) -> None:
    settings = {
        "pipeline_length": 2, "micro_batches": 2, "schedule": schedule, "tied_weights": tied,
    }  # fmt: skip
    below, ours = two_ranks.run(train, name, LEAST[name], settings)
    theirs = two_ranks.run(train, name, NEVER, settings)[1]
    # Rank 0 has compared one loss with the model's own, before the start.
    assert len(ours["calls"]) > len(below["calls"]) == 1 and not theirs["calls"]
    assert_trains_alike(ours, theirs, rounding)


def test_who_reads_logits_gets_them() -> None:
    entries, shapes = data(LARGE), []

    def right(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        shapes.append(tuple(output.shape))
        return (output.argmax(-1) == target).sum(), target.numel()

    with Trainer(
        build(LARGE), entries, eval_dataset=entries, optimizer=sgd, epochs=1, progress=False,
        global_batch_size=BATCH_SIZE, metrics={"right": right},
    ) as trainer:  # fmt: skip
        trainer.step()
        evaluated = trainer.evaluate()
        predicted = trainer.predict(entries)
    assert shapes and {shape[-1] for shape in shapes} == {4500}
    assert "right" in evaluated and predicted.predictions.shape[-1] == 4500


def test_a_hook_on_the_head_keeps_its_logits() -> None:
    layered, calls = presented(build(KINDS["llama"])), []
    assert layered.words is not None and layered.words.is_plain
    layered.words.linear.register_forward_hook(lambda *_: calls.append(1))
    assert not layered.words.is_plain

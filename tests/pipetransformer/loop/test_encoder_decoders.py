"""T5, BART and Whisper: a frozen encoder and a decoder's frozen blocks run once a sample."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    T5ForTokenClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from pipetransformer import Trainer, attach
from tests.helpers.marks import slow
from tests.helpers.part_models import NUM_SAMPLES, Samples

_WORDS, _BATCH = 60, 4
_SHAPE = {
    "vocab_size": _WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Name a model's encoder, its decoder, and that one's list of blocks."""

    build: Callable[[], nn.Module]
    encoder: str
    decoder: str
    blocks: str


def _t5_config() -> T5Config:
    return T5Config(
        vocab_size=_WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=3,
        num_heads=2, decoder_start_token_id=0, num_labels=5,
    )  # fmt: skip


def _t5() -> nn.Module:
    model = T5ForConditionalGeneration(_t5_config())
    # What is not in a block goes on training, and would draw below those that are frozen.
    model.decoder.dropout.p = 0.0
    return model


def _bart() -> nn.Module:
    model = BartForConditionalGeneration(BartConfig(**_SHAPE, max_position_embeddings=16))
    model.model.decoder.dropout = 0.0
    return model


def _whisper() -> nn.Module:
    places = {"max_source_positions": 10, "max_target_positions": 12, "num_mel_bins": 8}
    model = WhisperForConditionalGeneration(WhisperConfig(**_SHAPE, **places, dropout=0.1))
    model.model.decoder.dropout = 0.0
    return model


FAMILIES = {
    "t5": Family(_t5, "encoder", "decoder", "block"),
    "bart": Family(_bart, "model.encoder", "model.decoder", "layers"),
    "whisper": Family(_whisper, "model.encoder", "model.decoder", "layers"),
}
_QUICKLY = [slow("t5"), "bart", slow("whisper")]
"""T5's samples are computed one by one at first, and its position bias has a test of its own."""


def _words(num: int) -> Tensor:
    return torch.randint(3, _WORDS, (NUM_SAMPLES, num))


def _data(name: str, kind: str = "labels") -> Samples:
    """Return samples with labels alone beside the inputs, or texts padded to one length."""
    labels = _words(6)
    if kind == "padded":
        ends = 3 + torch.arange(NUM_SAMPLES) % 4
        labels = labels.masked_fill(torch.arange(6) >= ends[:, None], -100)
    if name == "whisper":
        return Samples(input_features=torch.randn(NUM_SAMPLES, 8, 20), labels=labels)
    ids = _words(8)
    if kind == "labels":
        return Samples(input_ids=ids, labels=labels)
    mask = (torch.arange(8) < (4 + torch.arange(NUM_SAMPLES) % 5)[:, None]).long()
    return Samples(input_ids=ids * mask, attention_mask=mask, labels=labels)


@dataclass
class Loop:
    """Train as people do.

    Args:
        accumulates: batches a step.
        autocast: dtype of the forward.
    """

    accumulates: int = 1
    autocast: torch.dtype | None = None

    def run(
        self,
        model: nn.Module,
        epochs: Iterable[Iterable[Any]],
        before: Callable[[int], None] = lambda _: None,
    ) -> list[float]:
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        losses = []
        for number, epoch in enumerate(epochs):
            model.train()
            before(number)
            for place, batch in enumerate(epoch, 1):
                on = self.autocast is not None
                with torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=on):
                    loss = model(**batch).loss / self.accumulates
                loss.backward()
                losses.append(loss.item())
                if place % self.accumulates == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return losses


def _freeze_by_hand(model: nn.Module, family: Family, num: int) -> None:
    """Freeze what lies below the decoder's block of this number; all that in eval mode."""
    model.get_submodule(family.encoder).requires_grad_(False).eval()
    decoder = model.get_submodule(family.decoder)
    blocks = getattr(decoder, family.blocks)
    below = [
        part
        for name, part in decoder.named_children()
        if name.startswith("embed") or name == "layernorm_embedding"
    ]
    for part in [*below, *blocks[:num]] if num else []:
        part.requires_grad_(False).eval()
        for parameter in part.parameters():
            parameter.grad = None


def _counted(module: nn.Module, runs: list[int]) -> None:
    run = module.forward

    def count(*args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        return run(*args, **kwargs)

    module.forward = count


def _first_linear(module: nn.Module) -> nn.Module:
    return next(m for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv1d)))


def _pair(name: str) -> tuple[nn.Module, nn.Module, Family]:
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = family.build()
    model.get_submodule(family.encoder).requires_grad_(False).eval()
    return model, copy.deepcopy(model), family


def _loader(data: Any, **settings: Any) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(data, batch_size=_BATCH, shuffle=True, **settings)


def _assert_alike(model: nn.Module, plain: nn.Module, rounds: float) -> None:
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=rounds, atol=rounds, msg=name)


@pytest.mark.parametrize("name", _QUICKLY)
@pytest.mark.parametrize(
    ("kind", "loop", "settings"),
    [
        ("labels", Loop(), {}),
        slow("padded", Loop(), {}),
        slow("labels", Loop(accumulates=3), {}),
        slow("padded", Loop(autocast=torch.bfloat16), {"precision": "bf16"}),
    ],
)
def test_a_decoders_frozen_blocks_and_its_encoder_run_once_a_sample(
    name: str, kind: str, loop: Loop, settings: dict[str, Any]
) -> None:
    model, plain, family = _pair(name)
    freeze, data = [0, 1, 2, 2], _data(name, kind)
    loader = _loader(data)
    expected = loop.run(
        plain,
        (loader for _ in freeze),
        lambda epoch: _freeze_by_hand(plain, family, freeze[epoch]),
    )
    runs = [0]
    decoder = model.get_submodule(family.decoder)
    for part in (model.get_submodule(family.encoder), *getattr(decoder, family.blocks)[:2]):
        _counted(_first_linear(part), runs)
    loader, hits = _loader(data), []
    with attach(
        model, parts=[family.encoder], freeze=freeze, cache=True, tied_weights="freeze", **settings
    ) as cached:

        def epochs() -> Iterable[Iterable[Any]]:
            for _ in freeze:
                runs[0] = 0
                yield cached.epoch(loader)
                hits.append(cached.stats.hits)

        found = loop.run(model, epochs())
    assert runs == [0] and hits[-1] == NUM_SAMPLES
    # Rows are computed in chunks of other sizes than the loop's batches.
    rounds = 1e-6 if loop.autocast is None else 1e-2
    assert found == pytest.approx(expected, rel=rounds, abs=0)
    _assert_alike(model, plain, 10 * rounds if loop.autocast is None else 5e-3)


def _train(
    name: str, model: nn.Module, data: Any, attached: Any, num_epochs: int = 2, **settings: Any
) -> list[float]:
    loader = _loader(data, **settings)
    with attached as cached:
        return Loop().run(model, (cached.epoch(loader) for _ in range(num_epochs)))


@pytest.mark.parametrize("name", [slow("t5"), slow("bart"), "whisper"])
@pytest.mark.parametrize(
    ("loop", "settings"),
    [(Loop(accumulates=3), {}), slow(Loop(autocast=torch.bfloat16), {"precision": "bf16"})],
)
def test_a_whole_decoder_trains_on_rows_of_its_encoder(
    name: str, loop: Loop, settings: dict[str, Any]
) -> None:
    model, plain, family = _pair(name)
    data, runs = _data(name), [0]
    loader, encoder = _loader(data), plain.get_submodule(family.encoder)
    expected = loop.run(plain, [loader] * 3, lambda _: [encoder.eval(), None][1])
    _counted(_first_linear(model.get_submodule(family.encoder)), runs)
    loader = _loader(data)
    with attach(model, parts=[family.encoder], cache=True, **settings) as cached:

        def epochs() -> Iterable[Iterable[Any]]:
            for _ in range(3):
                runs[0] = 0
                yield cached.epoch(loader)

        found = loop.run(model, epochs())
        assert runs == [0] and cached.stats.hits == NUM_SAMPLES
    assert found == expected
    _assert_alike(model, plain, 0)


def test_blocks_that_hand_a_position_bias_on_have_rows_without_an_encoder() -> None:
    torch.manual_seed(0)
    model = T5ForTokenClassification(_t5_config())
    model.transformer.encoder.dropout.p = 0.0
    plain, data = copy.deepcopy(model), _data("t5", "padded")
    data.columns["labels"] = data.columns["input_ids"] % 5
    loader, runs = _loader(data), [0]
    stack = plain.transformer.encoder

    def by_hand(_: int) -> None:
        for part in (stack.embed_tokens, stack.block[0]):
            part.requires_grad_(False).eval()

    expected = Loop().run(plain, [loader] * 3, by_hand)
    _counted(model.transformer.encoder.block[0].layer[0].SelfAttention.q, runs)
    loader = _loader(data)
    with attach(model, freeze=1) as cached:

        def epochs() -> Iterable[Iterable[Any]]:
            for _ in range(3):
                runs[0] = 0
                yield cached.epoch(loader)

        assert Loop().run(model, epochs()) == pytest.approx(expected, rel=1e-6, abs=0)
        assert runs == [0] and cached.stats.hits == NUM_SAMPLES
    _assert_alike(model, plain, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_another_run_reads_kept_rows(name: str, tmp_path: Path) -> None:
    settings: Any = {
        "cache_keep": True, "cache_folder": str(tmp_path), "tied_weights": "freeze", "freeze": 1,
        "parts": [FAMILIES[name].encoder],
    }  # fmt: skip
    losses = []
    for run in range(2):
        model, _, _ = _pair(name)
        torch.manual_seed(3)
        data = _data(name)
        cached = attach(model, **settings)
        losses.append(_train(name, model, data, cached, num_epochs=1))
        assert run == 0 or cached.stats.hits == NUM_SAMPLES
    assert losses[0] == losses[1]


def _pad(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pads = {"labels": -100}
    return {
        name: nn.utils.rnn.pad_sequence(
            [item[name][: 4 + int(item["input_ids"][0]) % 3] for item in items],
            batch_first=True,
            padding_value=pads.get(name, 0),
        )
        for name in items[0]
    }


@pytest.mark.parametrize("name", [slow("t5"), "bart"])
def test_texts_padded_by_batch_have_no_rows_and_the_same_losses(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain, family = _pair(name)
    data = _data(name)
    loader = _loader(data, collate_fn=_pad)
    expected = Loop().run(plain, [loader] * 2, lambda _: _freeze_by_hand(plain, family, 1))
    cached = attach(model, parts=[family.encoder], freeze=1, tied_weights="freeze", cache=True)
    assert _train(name, model, data, cached, collate_fn=_pad) == expected
    assert cached.stats.hits == 0 and "no cache" in caplog.text


@pytest.mark.parametrize("name", _QUICKLY)
def test_labels_that_the_loop_has_changed_are_computed_from_the_start(name: str) -> None:
    model, plain, family = _pair(name)
    data = _data(name)

    class Changed(nn.Module):
        """Change the labels of each second batch."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.num = inner, 0

        def forward(self, **batch: Tensor) -> Any:
            self.num += 1
            labels = batch.pop("labels")
            return self.inner(**batch, labels=labels.flip(1) if self.num % 2 else labels)

    loader = _loader(data)
    expected = Loop().run(
        Changed(plain), [loader] * 3, lambda _: _freeze_by_hand(plain, family, 1)
    )
    cached = attach(model, parts=[family.encoder], freeze=1, tied_weights="freeze", cache=True)
    wrapped = Changed(model)
    found = _train(name, wrapped, data, cached, num_epochs=3)
    assert found == pytest.approx(expected, rel=1e-6, abs=0)
    _assert_alike(model, plain, 1e-5)


def test_labels_decide_what_a_decoder_is_given_whatever_their_name_and_from_when_on() -> None:
    """BART's decoder runs on the inputs themselves where no labels are given."""
    model, plain, family = _pair("bart")
    data = _data("bart")
    data.columns["target"] = data.columns.pop("labels")

    def run(model: nn.Module, epochs: Iterable[Iterable[Any]]) -> list[float]:
        losses, head = [], nn.functional.cross_entropy
        for number, epoch in enumerate(epochs):
            model.train()
            if model is plain:
                _freeze_by_hand(plain, family, 1)
            for batch in epoch:
                ids, target = batch["input_ids"], batch["target"]
                if number % 2:
                    loss = model(input_ids=ids, labels=target).loss
                else:
                    logits = model(input_ids=ids).logits[:, : target.shape[1]]
                    loss = head(logits.flatten(0, 1), target.flatten())
                loss.backward()
                losses.append(loss.item())
        return losses

    loader = _loader(data)
    torch.manual_seed(2)
    expected = run(plain, [loader] * 4)
    loader = _loader(data)
    torch.manual_seed(2)
    with attach(
        model, parts=[family.encoder], freeze=1, tied_weights="freeze", cache=True
    ) as cached:
        found = run(model, (cached.epoch(loader) for _ in range(4)))
    assert found == pytest.approx(expected, rel=1e-6, abs=0)


def test_an_encoder_that_trains_is_the_row_itself_as_before() -> None:
    for name in ("t5", "bart"):
        model = FAMILIES[name].build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        with attach(model, freeze=1, tied_weights="freeze") as cached:
            next(iter(cached.epoch(_loader(_data(name)))))
        family = FAMILIES[name]
        first, second = getattr(model.get_submodule(family.encoder), family.blocks)
        assert not any(p.requires_grad for p in first.parameters())
        assert all(p.requires_grad for p in second.parameters())


def test_an_encoder_that_an_earlier_loop_froze_is_the_row_still() -> None:
    model, data = FAMILIES["bart"].build(), _data("bart")
    model.model.encoder.dropout = 0.0
    for num in (2, 1):
        with attach(model, freeze=num, tied_weights="freeze") as cached:
            next(iter(cached.epoch(_loader(data))))
    first, second = model.model.encoder.layers
    assert not any(p.requires_grad for p in first.parameters())
    assert all(
        p.requires_grad
        for p in [*second.parameters(), *model.model.decoder.layers[0].parameters()]
    )


def test_an_encoder_that_is_thawed_or_changed_gives_no_old_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, _, _ = _pair("t5")
    loader = _loader(_data("t5"))
    with attach(model, parts=["encoder"], freeze=1, cache=True) as cached:
        for epoch in range(3):
            if epoch == 2:
                with torch.no_grad():
                    model.encoder.block[0].layer[0].SelfAttention.q.weight.mul_(2)
            for batch in cached.epoch(loader):
                model(**batch).loss.backward()
        assert cached.stats.misses > 0
        assert "weights of frozen layers were changed" in caplog.text
        model.encoder.block[1].requires_grad_(True)
        with pytest.raises(ValueError, match="needs a gradient again"):
            model(**next(iter(cached.epoch(loader))))


def test_rows_of_several_tensors_are_not_rounded() -> None:
    model, _, _ = _pair("t5")
    with pytest.raises(ValueError, match="cache_dtype='bfloat16' .* return several"):
        next(
            iter(
                attach(model, parts=["encoder"], freeze=1, cache_dtype="bfloat16").epoch(
                    _loader(_data("t5"))
                )
            )
        )


def test_the_trainer_names_blocks_that_hand_several_tensors_on(tmp_path: Path) -> None:
    model, data = _t5(), _data("t5")
    with pytest.raises(ValueError, match=r"encoder.block: block 1 takes .*`attach` takes blocks"):
        Trainer(model, data, folder=str(tmp_path)).fit()


class Block(nn.Module):
    """Hand on, beside the hidden state, what `gives` makes of it or of what came."""

    def __init__(self, gives: Callable[[Tensor, Tensor | None], Tensor | None]) -> None:
        super().__init__()
        self.linear, self.gives = nn.Linear(4, 4), gives

    def forward(self, hidden: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor | None]:
        own = self.linear(hidden)
        return own if more is None else own + more, self.gives(own, more)


class Chain(nn.Module):
    """Three blocks; the third takes what `takes` says of the blocks before."""

    def __init__(self, gives: Any, takes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(gives) for _ in range(3)])
        self.head, self.takes = nn.Linear(4, 5), takes

    def forward(self, x: Tensor) -> Tensor:
        hidden, first = self.blocks[0](x, None)
        hidden, second = self.blocks[1](hidden, first)
        hidden, _ = self.blocks[2](hidden, (first, second)[self.takes])
        answer: Tensor = self.head(hidden)
        return answer


def _chain_epochs(model: nn.Module) -> int:
    torch.manual_seed(0)
    data = Samples(x=torch.randn(NUM_SAMPLES, 4), y=torch.arange(NUM_SAMPLES) % 5)
    with attach(model, freeze=1) as cached:
        for _ in range(2):
            for batch in cached.epoch(DataLoader(data, batch_size=4)):
                nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        return cached.stats.hits


def test_what_is_of_a_batch_is_no_row_and_what_skips_a_block_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert _chain_epochs(Chain(lambda own, more: own.sin() if more is None else more, 1)) == 12
    assert _chain_epochs(Chain(lambda own, _: own.mean(0, keepdim=True), 1)) == 0
    assert "statistics of a batch" in caplog.text
    assert _chain_epochs(Chain(lambda own, _: own.sin(), 0)) == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_an_evaluation_gives_the_losses_of_the_model_without_rows(name: str) -> None:
    model, _, family = _pair(name)
    train, other = _loader(_data(name)), DataLoader(_data(name), batch_size=_BATCH)
    with attach(
        model, parts=[family.encoder], freeze=1, tied_weights="freeze", cache=True
    ) as cached:
        for batch in cached.epoch(train):
            model(**batch).loss.backward()
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                found = [model(**batch).loss.item() for batch in cached.evaluation(other)]
        expected = [model(**batch).loss.item() for batch in other]
    assert found == pytest.approx(expected, rel=1e-6, abs=0)

"""Models are called in many ways, and answer in many: rows serve them all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertForTokenClassification,
    CLIPConfig,
    CLIPModel,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import freeze as freezing
from pipetransformer import attach
from tests.helpers.any_models import KINDS, build, data
from tests.helpers.row_models import (
    NUM_SAMPLES,
    Block,
    Model,
    TextModel,
    columns,
    labelled_texts,
    texts,
    words,
)
from tests.helpers.row_stories import made
from tests.pipetransformer.loop.test_cached_loop import Samples

DEPTH = 2
Loss = Callable[[Any, Any], Tensor]


class Answering(nn.Module):
    """Answer with whatever is asked for; the second argument is needed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed = kind, words()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Tensor, targets: Tensor | None = None) -> Any:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden.mean(1)) * scale[:, None]
        loss = None if targets is None else F.cross_entropy(logits, targets)
        answers = {
            "pair": (logits, loss),
            "dict": {"embeddings": hidden.mean(1), "score": logits},
            "pooled": [hidden.mean(1), {"logits": logits}],
        }
        return answers[self.kind]


def scaled() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 9, (NUM_SAMPLES, 5), generator=generator)
    scale = torch.rand(NUM_SAMPLES, generator=generator, dtype=torch.float64) + 0.5
    return TensorDataset(ids, scale, torch.arange(NUM_SAMPLES) % 3)


def of_pair(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0], batch[1], batch[2])[1]
    return loss


def of_dict(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0], scale=batch[1])["score"], batch[2])


def of_pooled(model: Any, batch: Any) -> Tensor:
    pooled, rest = model(scale=batch[1], x=batch[0])
    return F.cross_entropy(rest["logits"], batch[2]) + pooled.square().mean()


def run(
    make: Callable[[], Any],
    loader: DataLoader[Any],
    blocks: str,
    loss_of: Loss,
    *,
    attached: bool,
    **settings: Any,
) -> tuple[list[float], dict[str, Tensor], int]:
    """Train for three epochs; return losses, weights and the last epoch's hits."""
    torch.manual_seed(0)
    model = make().double().train()
    layers = [*model.get_submodule(blocks)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cached: Any = attach(model, freeze=DEPTH, **settings) if attached else None
    freezing.apply(model, 0 if attached else DEPTH, layers=layers)
    losses = []
    torch.manual_seed(1)
    for _ in range(3):
        for batch in cached.epoch(loader) if attached else loader:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    hits = cached.stats.hits if attached else 0
    if attached:
        cached.close()
    return losses, model.state_dict(), hits


def assert_served(
    make: Callable[[], Any],
    loader: Callable[[], DataLoader[Any]],
    blocks: str,
    loss_of: Loss,
    **settings: Any,
) -> None:
    plain = run(make, loader(), blocks, loss_of, attached=False)
    ours = run(make, loader(), blocks, loss_of, attached=True, **settings)
    assert ours[0] == pytest.approx(plain[0], rel=1e-9)
    for name, tensor in plain[1].items():
        torch.testing.assert_close(ours[1][name], tensor, rtol=1e-9, atol=1e-9)
    assert ours[2] == len(loader().dataset)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "loss_of"), [("pair", of_pair), ("dict", of_dict), ("pooled", of_pooled)]
)
def test_any_answer_and_any_call_are_served(kind: str, loss_of: Loss) -> None:
    assert_served(partial(Answering, kind), lambda: DataLoader(scaled(), 4), "blocks", loss_of)


def clip() -> CLIPModel:
    shape = {
        "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "intermediate_size": 16,
    }  # fmt: skip
    config = CLIPConfig(
        text_config={**shape, "vocab_size": 20, "max_position_embeddings": 8, "eos_token_id": 19},
        vision_config={**shape, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    return CLIPModel(config)


class Encoder(nn.Module):
    """Pool what CLIP's text tower returns, which is no logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = clip().text_model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pool: bool = False) -> Any:
        answer = self.tower(input_ids=input_ids, attention_mask=attention_mask)
        return answer.pooler_output if pool else answer


def encoded() -> DataLoader[Any]:
    ids = torch.randint(1, 18, (10, 6), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = 19
    entries = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return DataLoader(Samples({**entries, "target": torch.rand(10, 16).double()}), 5)


def of_flag(model: Any, batch: Any) -> Tensor:
    pooled = model(batch["input_ids"], batch["attention_mask"], pool=True)
    return F.mse_loss(pooled, batch["target"])


def test_a_flag_beside_the_tensors_is_learnt() -> None:
    torch.manual_seed(5)
    loader = encoded()
    assert_served(Encoder, lambda: loader, "tower.encoder.layers", of_flag)


class Tagged:
    """Give texts of unequal length, with a label for each token."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [(index * 7 + place * 3) % 30 + 1 for place in range(3 + index % 4)]
        return {
            "input_ids": ids,
            "attention_mask": [1] * len(ids),
            "labels": [one % 3 for one in ids],
        }


def tagger() -> BertForTokenClassification:
    return BertForTokenClassification(
        BertConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
    )


def tagged(tokenizer: Any) -> DataLoader[Any]:
    collate = DataCollatorForTokenClassification(tokenizer)
    return DataLoader(Tagged(), 4, collate_fn=collate)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    made = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def test_labels_of_tokens_that_are_padded_with_their_batch_are_served(tokenizer: Any) -> None:
    def own_loss(model: Any, batch: Any) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    assert_served(tagger, lambda: tagged(tokenizer), "bert.encoder.layer", own_loss)


def test_logits_that_a_loop_takes_of_padding_are_not_cached(tokenizer: Any) -> None:
    def all_logits(model: Any, batch: Any) -> Tensor:
        given = {name: entry for name, entry in batch.items() if name != "labels"}
        return model(**given).logits.square().mean()

    plain, ours = (
        run(tagger, tagged(tokenizer), "bert.encoder.layer", all_logits, attached=one)
        for one in (False, True)
    )
    assert ours[0] == pytest.approx(plain[0], rel=1e-9)
    assert ours[2] == 0


def _of_pair(loss: Any, model: Any, batch: Any) -> Tensor:
    own: Tensor = loss(model(batch[0]), batch[1])
    return own


def _texts() -> TensorDataset:
    ids, _, labels = scaled().tensors
    return TensorDataset(ids, labels)


def _texts_model() -> nn.Module:
    from tests.helpers.row_models import Model

    return Model()


def test_a_hook_on_the_model_that_reads_its_arguments_is_served() -> None:
    def hooked() -> nn.Module:
        model = _texts_model()
        model.register_forward_pre_hook(lambda _, args: ((args[0] + 1) % 9,))
        return model

    loss = partial(_of_pair, nn.functional.cross_entropy)
    assert_served(hooked, lambda: DataLoader(_texts(), 4), "blocks", loss)


def test_adapters_that_are_switched_off_within_a_step_stay_frozen() -> None:
    """As in DPO, whose reference is the model without its adapters."""
    kind = KINDS["gpt2_classifier"]

    def make() -> Any:
        config = peft.LoraConfig(
            r=2, target_modules=["c_attn"], lora_dropout=0.0, init_lora_weights=False,
            fan_in_fan_out=True, task_type="SEQ_CLS",
        )  # fmt: skip
        return peft.get_peft_model(build(kind), config)

    def loss_of(model: Any, batch: Any) -> Tensor:
        given = {name: entry for name, entry in batch.items() if name != "labels"}
        with torch.no_grad(), model.disable_adapter():
            reference = model(**given).logits
        for name, parameter in model.named_parameters():
            if "lora_" in name and any(f"h.{i}." in name for i in range(DEPTH)):
                parameter.requires_grad_(False)  # As peft has it learn again.
        logits = model(**given).logits
        return F.cross_entropy(logits - reference, batch["labels"])

    loader = DataLoader(Samples(dict(data(kind).tensors)), 5)
    assert_served(make, lambda: loader, "base_model.model." + kind.blocks, loss_of)


def whisper() -> nn.Module:
    """Build one whose decoder makes its inputs of labels."""
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=30,
            d_model=16,
            encoder_layers=3,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_mel_bins=4,
            max_source_positions=8,
            max_target_positions=8,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )  # fmt: skip
    )


def speech() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "input_features": torch.randn(4, 16, generator=generator, dtype=torch.float64),
            "labels": torch.randint(3, 30, (5,), generator=generator),
        }
        for _ in range(NUM_SAMPLES)
    ]


def of_labels(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def of_labels_by_hand(model: Any, batch: Any) -> Tensor:
    logits = model(batch["input_features"], labels=batch["labels"])["logits"]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("loss_of", [of_labels, of_labels_by_hand])
def test_a_decoder_that_needs_labels_is_run_with_them(loss_of: Loss) -> None:
    assert_served(whisper, lambda: DataLoader(speech(), 4), "model.encoder.layers", loss_of)


def of_changed_labels(model: Any, batch: Any) -> Tensor:
    batch["labels"][:, 0] = -100
    return of_labels(model, batch)


def test_labels_that_a_loop_changes_have_the_forward_run_from_its_start() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(speech(), 4)

    plain = run(whisper, loader(), "model.encoder.layers", of_changed_labels, attached=False)
    ours = run(whisper, loader(), "model.encoder.layers", of_changed_labels, attached=True)
    assert ours[0] == pytest.approx(plain[0], rel=1e-9)
    for name, tensor in plain[1].items():
        torch.testing.assert_close(ours[1][name], tensor, rtol=1e-9, atol=1e-9)


def test_a_first_call_that_fails_can_be_mended() -> None:
    model, loader = made(TextModel), DataLoader(labelled_texts(), 4)
    with attach(model, freeze=DEPTH) as cached:
        for epoch in range(3):
            for step, batch in enumerate(cached.epoch(loader)):
                if epoch == step == 0:
                    with pytest.raises((TypeError, ValueError), match="input_ids"):
                        model(attention_mask=batch["attention_mask"])
                model(batch["input_ids"], batch["attention_mask"])
        assert cached.stats.hits == NUM_SAMPLES


def test_a_first_forward_of_changed_values_is_refused() -> None:
    dataset = TensorDataset(*columns("ids", "labels", "others"))
    model = made(Model)
    with attach(model, freeze=DEPTH) as cached, pytest.raises(ValueError, match="first forward"):
        for batch in cached.epoch(DataLoader(dataset, 4)):
            model(batch[0] + 0)


def test_a_forward_without_named_parameters_is_refused() -> None:
    model = made(Model)
    own = model.forward
    model.forward = lambda *args: 2 * own(*args)
    with attach(model, freeze=DEPTH) as cached, pytest.raises(ValueError, match="names nothing"):
        next(cached.epoch(DataLoader(texts(), 4)))


@pytest.mark.parametrize("edit", ["linear", "order", "weight"])
def test_blocks_that_freeze_after_they_were_replaced_are_refused(edit: str) -> None:
    model, loader = made(Model), DataLoader(texts(), 4)
    with attach(model, freeze=[1, 3]) as cached:
        for batch in cached.epoch(loader):
            model(batch[0])
        if edit == "linear":
            model.blocks[2].linear = nn.Sequential(model.blocks[2].linear, nn.Tanh())
        elif edit == "order":
            model.blocks[2], model.blocks[3] = model.blocks[3], model.blocks[2]
        else:
            nn.utils.parametrizations.weight_norm(model.blocks[2].linear)
        with pytest.raises(ValueError, match="was replaced since they were looked at"):
            next(cached.epoch(loader))


def test_a_thaw_of_weights_that_were_assigned_is_refused() -> None:
    model, loader = made(Model), DataLoader(texts(), 4)
    with attach(model, freeze=DEPTH) as cached:
        batches = cached.epoch(loader)
        model(next(batches)[0])
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        batch = next(batches)
        model.blocks[0].requires_grad_(True)
        with pytest.raises(ValueError, match="of a frozen block needs a gradient again"):
            model(batch[0])


def test_hidden_states_that_transformers_notes_by_hooks_are_given_once() -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 12}
    model = BertForTokenClassification(BertConfig(vocab_size=20, hidden_size=8, **config))
    with attach(model, freeze=1) as cached:
        for batch in cached.epoch(DataLoader(labelled_texts(), 4)):
            assert len(model(batch["input_ids"], output_hidden_states=True).hidden_states) == 5

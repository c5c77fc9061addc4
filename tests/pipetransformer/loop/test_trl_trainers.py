"""A callback changes no number of TRL's trainers, as scripts use them: packed, with adapters.

The reference is the same training without rows. There blocks run once for each forward.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from pipetransformer import FreezeCallback
from tests.helpers.any_models import KINDS, Kind, build
from tests.helpers.marks import slow
from tests.pipetransformer.loop.test_sft_callback import texts, tokenizer

trl = pytest.importorskip("trl")

NUM, NUM_FROZEN, NUM_EPOCHS = 10, 2, 3
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}w3 {{m.content}} {% else %}w4 "
    "{% generation %}{{m.content}} <eos>{% endgeneration %}{% endif %}{% endfor %}"
)
"""As conversations are spelt, with what TRL marks as the assistant's."""


def deep(kind: Kind, **options: Any) -> Kind:
    return replace(kind, options={**kind.options, "num_hidden_layers": 4, **options})


QWEN = deep(KINDS["qwen3"])
TIED = deep(KINDS["qwen3"], tie_word_embeddings=True)
RATED = replace(QWEN, name="Qwen3ForSequenceClassification")


def words(text: int, num: int) -> str:
    return " ".join(f"w{3 + (7 * text + 3 * word) % 30}" for word in range(num))


def prompts() -> list[str]:
    return [words(one, 2 + one % 3) for one in range(NUM)]


def answers(step: int) -> list[str]:
    return [" " + words(one + step, 2 + (one + step) % 4) for one in range(NUM)]


def completions() -> Any:
    return datasets.Dataset.from_dict({"prompt": prompts(), "completion": answers(1)})


def conversations() -> Any:
    pairs = zip(prompts(), answers(1), strict=True)
    turns = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": other}]
        for one, other in pairs
    ]
    return datasets.Dataset.from_dict({"messages": turns})


def preferences() -> Any:
    columns = {"prompt": prompts(), "chosen": answers(1), "rejected": answers(2)}
    return datasets.Dataset.from_dict(columns)


def judged() -> Any:
    labels = [one % 2 == 0 for one in range(NUM)]
    return datasets.Dataset.from_dict(
        {"prompt": prompts(), "completion": answers(1), "label": labels}
    )


@dataclass(frozen=True)
class Case:
    """Describe a script.

    Args:
        lora: options of an adapter; `upper` puts it into the upper blocks alone. None trains all.
        is_wrapped: whether the script makes the peft model, and not the trainer.
        runs: of a frozen block in the last epoch, and without rows.
    """

    trainer: str = "SFT"
    data: Callable[[], Any] = texts
    settings: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    kind: Kind = QWEN
    is_wrapped: bool = False
    has_reference: bool = False
    runs: tuple[int, int] = (0, 6)
    callback: dict[str, Any] = field(default_factory=dict)


UPPER = {"layers_to_transform": [2, 3]}
FULL = {"bf16": False}


class Runs(TrainerCallback):  # type: ignore[misc]
    """Count forwards of the last epoch, by module."""

    def __init__(self) -> None:
        self.by_module = Counter[int]()

    def on_epoch_begin(self, *args: Any, **facts: Any) -> None:
        self.by_module.clear()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    counted, own = Runs(), Qwen3MLP.forward

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        counted.by_module[id(self)] += 1
        return own(self, *args, **kwargs)

    # Of the class, as hooks on frozen modules would be waited for.
    monkeypatch.setattr(Qwen3MLP, "forward", forward)
    yield counted


@dataclass(frozen=True)
class Trained:
    numbers: list[float]
    weights: dict[str, Tensor]
    begin: dict[str, Tensor]
    num_runs: int


def adapter_of(case: Case) -> Any:
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    task = "SEQ_CLS" if case.kind is RATED else "CAUSAL_LM"
    return peft.LoraConfig(**{**options, "task_type": task, **(case.lora or {})})  # type: ignore[arg-type]


def train(case: Case, callback: Any, runs: Runs, folder: Path) -> Trained:
    torch.manual_seed(0)
    model: Any = build(case.kind).float()
    if case.kind is RATED:
        # No bias: a difference of rewards has none, and AdamW makes steps of its rounding.
        model.score = nn.Linear(16, 1, bias=False)
        model.num_labels = model.config.num_labels = 1
    given: dict[str, Any] = {}
    if case.has_reference:
        given["ref_model"] = build(case.kind).float()
    if case.is_wrapped:
        model = peft.get_peft_model(model, adapter_of(case))
    elif case.lora is not None:
        given["peft_config"] = adapter_of(case)
    arguments = getattr(trl, f"{case.trainer}Config")(
        str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=4,
        num_train_epochs=NUM_EPOCHS, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", eval_strategy="epoch", logging_steps=1, learning_rate=0.01,
        **{"max_length": 16, **case.settings},
    )  # fmt: skip
    spelling = tokenizer()
    spelling.chat_template = TEMPLATE
    trainer = getattr(trl, f"{case.trainer}Trainer")(
        model, args=arguments, train_dataset=case.data(), eval_dataset=case.data(),
        processing_class=spelling, callbacks=[callback, runs], **given,
    )  # fmt: skip
    trained = trainer.model
    begin = {name: one.detach().clone() for name, one in trained.state_dict().items()}
    lowest = next(one for name, one in trained.named_modules() if name.endswith("layers.0.mlp"))
    trainer.train()
    seen = ("loss", "eval_loss", "rewards/margins", "kl")
    logs = trainer.state.log_history
    numbers = [log[name] for log in logs for name in seen if name in log]
    return Trained(numbers, trained.state_dict(), begin, runs.by_module[id(lowest)])


def lies_below(name: str) -> bool:
    return any(f"layers.{index}." in name for index in range(NUM_FROZEN))


def assert_same(case: Case, runs: Runs, folder: Path) -> Trained:
    """Train with rows and without; return what came of it without."""
    plain = train(case, FreezeCallback(NUM_FROZEN, cache=False), runs, folder / "plain")
    callback = FreezeCallback(NUM_FROZEN, cache_folder=folder, **case.callback)
    ours = train(case, callback, runs, folder / "ours")
    assert ours.numbers == pytest.approx(plain.numbers, rel=1e-4, abs=1e-5)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-4, atol=1e-5)
        if lies_below(name):
            torch.testing.assert_close(weight, plain.begin[name], rtol=0, atol=0)
    assert not all(one.equal(plain.begin[name]) for name, one in plain.weights.items())
    assert (ours.num_runs, plain.num_runs) == case.runs
    assert (callback.stats.hits > 0) == (ours.num_runs < plain.num_runs)
    return plain


def sft(settings: Any = None, lora: Any = None, **more: Any) -> Case:
    return Case("SFT", settings=settings or {}, lora=lora, **more)


@pytest.mark.parametrize(
    "case",
    [
        slow(sft()),
        slow(sft(lora={})),
        slow(sft(lora=UPPER)),
        slow(sft(FULL, {}, kind=TIED)),
        slow(sft(FULL, UPPER, kind=TIED)),
        slow(sft(FULL, {"lora_dropout": 0.1})),
        slow(sft(FULL, {"use_dora": True})),
        slow(sft(FULL, {"use_dora": True, **UPPER})),
        slow(sft(FULL, {"modules_to_save": ["lm_head"]})),
        slow(sft(FULL, {"modules_to_save": ["lm_head"], **UPPER})),
        slow(sft(FULL, {"modules_to_save": ["lm_head", "embed_tokens"]})),
        slow(sft(FULL, {"trainable_token_indices": {"embed_tokens": [3, 4]}, **UPPER})),
        slow(sft(FULL, {"target_modules": "all-linear"})),
        slow(sft({**FULL, "gradient_checkpointing": False}, UPPER)),
        slow(sft({**FULL, "neftune_noise_alpha": 5}, UPPER)),
        slow(sft({**FULL, "label_smoothing_factor": 0.1}, UPPER, runs=(0, 12))),
        slow(sft(FULL, UPPER, data=completions)),
        slow(sft({**FULL, "assistant_only_loss": True}, UPPER, data=conversations)),
    ],
)
def test_fine_tuning_as_scripts_have_it_is_that_without_rows(
    case: Case, runs: Runs, tmp_path: Path
) -> None:
    assert_same(case, runs, tmp_path)


PACKED = {**FULL, "packing": True}
FREE = {**FULL, "padding_free": True, "max_length": None}


@pytest.mark.parametrize(
    "case",
    [
        sft(PACKED, UPPER, runs=(0, 2)),
        slow(sft(PACKED, {}, runs=(0, 2))),
        slow(sft({"packing": True}, UPPER, runs=(0, 2))),
        slow(sft({**PACKED, "packing_strategy": "bfd_split"}, UPPER, runs=(0, 2))),
        slow(sft({**PACKED, "packing_strategy": "wrapped"}, UPPER, runs=(0, 2))),
        slow(sft(FREE, UPPER)),
        slow(sft(FREE, UPPER, data=completions)),
        slow(sft(PACKED, UPPER, data=completions, runs=(0, 4))),
        slow(sft({**PACKED, "assistant_only_loss": True}, {}, data=conversations, runs=(0, 4))),
    ],
)
def test_packed_texts_have_rows_where_their_embeddings_need_gradients(
    case: Case, runs: Runs, tmp_path: Path
) -> None:
    """As peft's models do, whose layers TRL checkpoints: then no row could be parted."""
    assert_same(case, runs, tmp_path)


REENTRANT = {**FULL, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.mark.parametrize("case", [slow(sft(REENTRANT, UPPER)), slow(sft(REENTRANT))])
def test_checkpoints_that_enter_anew_have_rows_and_learn(
    case: Case, runs: Runs, tmp_path: Path
) -> None:
    reentrant = assert_same(case, runs, tmp_path)
    usual = train(
        replace(case, settings=FULL), FreezeCallback(NUM_FROZEN, cache=False), runs, tmp_path
    )
    for name, weight in usual.weights.items():
        torch.testing.assert_close(reentrant.weights[name], weight, rtol=1e-4, atol=1e-5)


def dpo(lora: Any = None, settings: Any = None, **more: Any) -> Case:
    return Case("DPO", preferences, {**FULL, **(settings or {})}, lora, **more)


SERVED, HALF = (0, 12), (6, 12)
"""Of both forwards of a step, or of that which trains; without its adapters a model is another."""


@pytest.mark.parametrize(
    "case",
    [
        slow(dpo(UPPER, runs=SERVED)),
        slow(dpo(UPPER, {"bf16": True}, runs=SERVED)),
        slow(dpo(UPPER, {"gradient_checkpointing": False}, runs=SERVED)),
        slow(dpo(UPPER, is_wrapped=True, runs=SERVED)),
        dpo({}, runs=HALF),
        slow(dpo({}, {"bf16": True}, runs=HALF)),
        slow(dpo({}, {"gradient_checkpointing": False}, runs=HALF)),
        slow(dpo({}, REENTRANT, runs=HALF)),
        slow(dpo({}, is_wrapped=True, runs=HALF)),
        slow(dpo({"use_dora": True}, runs=HALF)),
        slow(dpo({"modules_to_save": ["lm_head", "embed_tokens"]}, runs=HALF)),
        slow(dpo({}, {"precompute_ref_log_probs": True})),
        slow(dpo(UPPER, {"precompute_ref_log_probs": True})),
        slow(dpo(None, {"precompute_ref_log_probs": True}, has_reference=True)),
        slow(dpo(UPPER, has_reference=True)),
        slow(dpo(None, has_reference=True)),
    ],
)
def test_preferences_are_learnt_as_without_rows_and_frozen_adapters_stay(
    case: Case, runs: Runs, tmp_path: Path
) -> None:
    """peft has all adapters learn again when it switches them on: those of frozen blocks did."""
    assert_same(case, runs, tmp_path)


@pytest.mark.parametrize("settings", [slow(FULL), slow({})], ids=["float32", "defaults"])
@pytest.mark.parametrize("lora", [None, {}, UPPER], ids=["all", "lora", "upper"])
def test_rewards_are_learnt_as_without_rows(
    lora: Any, settings: Any, runs: Runs, tmp_path: Path
) -> None:
    assert_same(Case("Reward", preferences, settings, lora, RATED), runs, tmp_path)


PLAIN = {"loss_type": "apo_zero_unpaired", **FULL}


def kto(settings: Any, lora: Any, **more: Any) -> Case:
    return Case("KTO", judged, settings, lora, **more)


@pytest.mark.parametrize(
    "case",
    [
        slow(kto(PLAIN, UPPER, runs=SERVED)),
        slow(kto(PLAIN, {}, runs=HALF)),
        # A step has a forward of other completions for the divergence, too, by either model.
        slow(kto({}, UPPER, runs=(0, 24))),
        slow(kto(FULL, {}, runs=(12, 24))),
        slow(kto(FULL, UPPER, is_wrapped=True, runs=(0, 24))),
        slow(kto({**FULL, "precompute_ref_log_probs": True}, UPPER, runs=SERVED)),
        slow(kto(FULL, None, has_reference=True, runs=SERVED)),
    ],
)
def test_judged_answers_are_learnt_as_without_rows(case: Case, runs: Runs, tmp_path: Path) -> None:
    assert_same(case, runs, tmp_path)


@pytest.mark.slow
def test_a_mask_that_counts_padding_is_refused_beside_other_texts(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collator = trl.trainer.kto_trainer.DataCollatorForUnpairedPreference
    own = collator.torch_call

    def counting(self: Any, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = own(self, examples)
        return {**batch, "completion_mask": torch.ones_like(batch["completion_mask"])}

    monkeypatch.setattr(collator, "torch_call", counting)
    message = "'completion_mask' has other values than 0 where 'attention_mask' says padding"
    with pytest.raises(ValueError, match=message):
        train(kto(FULL, UPPER), FreezeCallback(2, cache_folder=tmp_path), runs, tmp_path)


@pytest.mark.parametrize(
    "config",
    [peft.PromptTuningConfig, slow(peft.PrefixTuningConfig)],
    ids=["prompt", "prefix"],
)
def test_a_script_that_can_have_no_rows_trains_without_and_is_told_why(
    config: Any,
    runs: Runs,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = config(task_type="CAUSAL_LM", num_virtual_tokens=3)
    monkeypatch.setattr(f"{__name__}.adapter_of", lambda case: given)
    case = sft({**FULL, "gradient_checkpointing": False}, {}, runs=(6, 6))
    assert_same(case, runs, tmp_path)
    assert "blocks freeze without rows: the model puts prompts that it learns" in caplog.text
    with pytest.raises(ValueError, match="puts prompts that it learns .* rows: cache=False"):
        train(case, FreezeCallback(NUM_FROZEN, cache=True), runs, tmp_path)

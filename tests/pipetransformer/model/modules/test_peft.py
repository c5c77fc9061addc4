"""Models of peft train as in a plain loop: adapters, and of the base nothing."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model

from pipetransformer.model import adapt
from tests.helpers.inspection import layered_of
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.peft_models import (
    CAUSAL,
    CLASSES,
    FROZEN,
    MODELS,
    Outcome,
    batch_of,
    bert,
    llama,
    loop,
    lora,
    make_trainer,
    samples_for,
    train,
    with_adapter,
)
from tests.helpers.pool import Pool

PROMPTS = ("prompt", "p-tuning")
"""They train in layer 0 alone: with it frozen, a loop would have nothing to train."""

IN_ONE_PROCESS = ["lora of timm", "dora", "lora in BERT", "prompt of BERT", "two adapters"]
IN_A_PIPELINE = [*("lora of GPT-2", "p-tuning", "lora of words and head")]


def some(fast: list[str]) -> list[Any]:
    return [name if name in fast else slow(name) for name in MODELS]


def frozen_of(name: str) -> tuple[int, ...]:
    return (0, 0, 0) if name in PROMPTS else FROZEN


def assert_as_loop(ours: Outcome, theirs: Outcome, trained: set[str]) -> None:
    """Compare losses and every weight, and what had an optimizer."""
    assert ours.weights.keys() == theirs.weights.keys()
    # Llama's norms are computed in float32, whatever its weights are.
    is_rounded = any("embed_tokens" in name for name in theirs.weights)
    allowed = {"rtol": 1e-5, "atol": 1e-7} if is_rounded else {"rtol": 1e-8, "atol": 1e-10}
    torch.testing.assert_close(ours.losses, theirs.losses, **allowed)
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, msg=name, **allowed)
    assert trained == theirs.trained


@pytest.mark.parametrize("name", some(IN_ONE_PROCESS))
def test_adapters_train_as_in_a_plain_loop(name: str) -> None:
    ours = train(name, frozen_of(name))
    assert_as_loop(ours, loop(name, frozen_of(name)), ours.trained)


@pytest.mark.parametrize("name", some(IN_A_PIPELINE))
def test_adapters_train_over_a_frozen_base_in_a_pipeline(two_ranks: Pool, name: str) -> None:
    frozen = frozen_of(name)
    ours, other = two_ranks.run(train, name, frozen, 2)
    assert_as_loop(ours, loop(name, frozen), ours.trained | other.trained)


@pytest.mark.parametrize("name", ["lora of Llama", slow("lora of BERT"), slow("prompt")])
def test_adapters_train_in_replicas(two_ranks: Pool, name: str) -> None:
    frozen = frozen_of(name)
    ours, other = two_ranks.run(train, name, frozen, 1)
    assert ours.trained == other.trained
    assert_as_loop(ours, loop(name, frozen), ours.trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora of GPT-2", "lora of BERT", "lora of words and head"])
def test_adapters_train_in_replicated_pipelines(four_ranks: Pool, name: str) -> None:
    outcomes = four_ranks.run(train, name, FROZEN, 2)
    trained = set().union(*(one.trained for one in outcomes))
    assert_as_loop(outcomes[0], loop(name), trained)


@measuring(never)
def dropping(length: int) -> Outcome:
    model = with_adapter(llama, lora(lora_dropout=0.5, **CAUSAL))
    with make_trainer(model, (0, 0), pipeline_length=length) as trainer:
        losses = [trainer.step().loss for _ in range(2)]
        return Outcome(losses, trainer.state_dict(), set())


def test_dropout_of_adapters_is_the_same_in_a_pipeline(two_ranks: Pool) -> None:
    ours, theirs = dropping(1), two_ranks.run(dropping, 2)[0]
    assert_as_loop(ours, theirs, set())
    assert ours.losses != train("lora of Llama", (0, 0)).losses


# Below upper layers there is nothing to train; elsewhere adapters freeze with their layer.
@pytest.mark.parametrize(("name", "num_frozen"), [("upper layers", 2), ("lora of timm", 1)])
def test_what_adapters_and_base_make_below_is_read_from_the_cache(
    name: str, num_frozen: int
) -> None:
    with make_trainer(MODELS[name](), freeze=f"schedule:{num_frozen}", epochs=3) as trainer:
        stats = [trainer.step().stats for _ in range(3)]
        assert [(one.hits, one.misses) for one in stats] == [(0, 8), (8, 0), (8, 0)]
        weights = trainer.state_dict()
    for parameter, weight in loop(name, (num_frozen,) * 3).weights.items():
        torch.testing.assert_close(weights[parameter], weight, rtol=1e-5, atol=1e-7)


def test_only_adapters_are_planned_to_need_gradients_and_moments() -> None:
    with make_trainer(MODELS["lora of BERT"]()) as trainer:
        trainer.begin()
        assert trainer.measurements is not None
        costs = trainer.measurements.sublayers
        planned = [cost.gradient_bytes for cost in costs]
        moments = [cost.optimizer_bytes for cost in costs]
        model = layered_of(trainer)
        trained = [
            sum(t.nbytes for n, t in model.tensors(i).items() if "lora" in n or "to_save" in n)
            for i in range(len(costs))
        ]
    assert planned == trained
    assert planned[0] == 0 and all(planned[1:])
    assert moments == planned  # SGD's momentum is as large as the gradient.


def merged() -> Any:
    model = with_adapter(llama, lora(**CAUSAL))
    model.merge_adapter()
    return model


REFUSED = {
    "ADALORA.*update_and_allocate.*give a LoraConfig": lambda: get_peft_model(
        llama(), peft.AdaLoraConfig(total_step=10, tinit=1, tfinal=1, **CAUSAL)
    ),
    "PREFIX_TUNING.*give a PromptTuningConfig": lambda: get_peft_model(
        llama(), PrefixTuningConfig(num_virtual_tokens=2, **CAUSAL)
    ),
    "MULTITASK_PROMPT_TUNING.*takes task_ids": lambda: get_peft_model(
        bert(), peft.MultitaskPromptTuningConfig(num_tasks=2, num_virtual_tokens=2, **CLASSES)
    ),
    "LORA with alora_invocation_tokens": lambda: get_peft_model(
        llama(), lora(alora_invocation_tokens=[3], **CAUSAL)
    ),
    "are merged into its weights.*unmerge_adapter": merged,
    "ADALORA.*give a LoraConfig": lambda: peft.inject_adapter_in_model(
        peft.AdaLoraConfig(total_step=10, tinit=1, tfinal=1, target_modules=["query"]), bert()
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_adapters_that_a_forward_and_its_loss_do_not_train_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_trainer(REFUSED[text]())


def test_adapters_that_are_not_loaded_to_train_are_refused_before_the_first_step() -> None:
    model = MODELS["lora of Llama"]()
    with model.disable_adapter():
        with make_trainer(model) as trainer:
            assert len(trainer.predict(samples_for(model)).predictions) == 8
        with make_trainer(model) as trainer:
            with pytest.raises(ValueError, match="no parameter.*is_trainable=True"):
                trainer.step()


def test_merged_adapters_train_once_they_are_taken_out_again_or_for_good() -> None:
    model = merged()
    model.unmerge_adapter()
    adapt(model, lambda names: batch_of(model))
    whole = merged().merge_and_unload()
    adapt(whole, lambda names: batch_of(whole))

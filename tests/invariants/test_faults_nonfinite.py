"""Prove that a bad number on any one rank ends the run on all, or skips the step on all, and
that the rank and the sublayer where it began are named."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipetransformer import Trainer
from pipetransformer.errors import NonFiniteError
from tests.helpers.inspection import stage_of
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool

BAD_STEP = 2
NAN = float("nan")


def make_trainer(on_nonfinite: str, length: int, **settings: Any) -> Trainer:
    return Trainer(
        tiny_model(),
        settings.pop("data", None) or tiny_data(),
        loss_fn=settings.pop("loss_fn", nn.CrossEntropyLoss()),
        global_batch_size=6,
        pipeline_length=length,
        on_nonfinite=on_nonfinite,
        progress=False,
        evaluate_every_epochs=0,
        **settings,
    )


def poisoned() -> TensorDataset:
    """Make one sample not a number."""
    x, y = tiny_data().tensors
    x = x.clone()
    x[3, 0] = NAN
    return TensorDataset(x, y)


@measuring(never)
def losses_with_a_nan(on_nonfinite: str, length: int) -> list[tuple[float, bool]]:
    """Train an epoch in which one batch is poisoned."""
    with make_trainer(on_nonfinite, length, data=poisoned()) as trainer:
        results = [trainer.step() for _ in range(5)]
        assert all(torch.isfinite(p).all() for p in stage_of(trainer).trained.parameters.values())
        return [(result.loss, result.skipped) for result in results]


def refuse_a_nan(length: int) -> str:
    with pytest.raises(NonFiniteError, match=r"step \d: the loss is nan") as caught:
        losses_with_a_nan("raise", length)
    return str(caught.value)


@pytest.mark.parametrize("length", [1, 2])
def test_a_bad_loss_ends_the_run_on_all_ranks_with_the_same_words(
    two_ranks: Pool, length: int
) -> None:
    first, second = two_ranks.run(refuse_a_nan, length)
    # It was put down to the learning rate, and to the rank that has the loss.
    assert first == second
    cause = "; it began in the data: 'x' of sample 3 holds numbers that are not finite. Correct"
    assert cause in first and "learning rate" not in first


@measuring(never)
def refuse_a_nan_in_a_stream() -> str:
    with make_trainer("raise", 2, data=poisoned(), weight_versions="stashed") as trainer:
        with pytest.raises(NonFiniteError, match="later steps have trained on it") as caught:
            for _ in range(5):
                trainer.step()
    return str(caught.value)


def test_a_stream_s_bad_sample_is_named_too(two_ranks: Pool) -> None:
    first, second = two_ranks.run(refuse_a_nan_in_a_stream)
    assert first == second and "in the data: 'x' of sample 3 holds" in first
    assert "learning rate" not in first


@measuring(never)
def refuse_a_loss_of_nan(length: int) -> str:
    """Train with a loss that is no number whatever it is given."""
    with (
        pytest.raises(NonFiniteError, match=r"step 0: the loss is nan") as caught,
        make_trainer("raise", length, loss_fn=lambda output, y: NAN * output.mean()) as trainer,
    ):
        trainer.step()
    return str(caught.value)


@pytest.mark.parametrize("length", [1, 2])
def test_a_bad_loss_of_good_samples_is_the_loss_s(two_ranks: Pool, length: int) -> None:
    first, second = two_ranks.run(refuse_a_loss_of_nan, length)
    assert first == second and "it began before the backward, in the loss of rank" in first
    assert "Lower the learning rate" in first
    assert length == 1 or "in the loss of rank 1." in first, "the last stage has the loss"


@measuring(never)
def refuse_given_weights() -> str:
    model = tiny_model()
    with torch.no_grad():
        model[2].inner.weight[0, 0] = NAN
    with (
        pytest.raises(NonFiniteError) as caught,
        tiny_trainer(model, pipeline_length=2, global_batch_size=6) as trainer,
    ):  # fmt: skip
        trainer.step()
    return str(caught.value)


def test_weights_that_were_given_bad_are_named(two_ranks: Pool) -> None:
    first, second = two_ranks.run(refuse_given_weights)
    assert first == second and "'2.inner.weight' of the model as it was given. Load" in first


@pytest.mark.parametrize("length", [1, 2])
def test_a_bad_loss_skips_the_step_on_all_ranks(two_ranks: Pool, length: int) -> None:
    first, second = two_ranks.run(losses_with_a_nan, "skip", length)
    assert [skipped for _, skipped in first] == [skipped for _, skipped in second]
    assert sum(skipped for _, skipped in first) == 1
    assert [repr(loss) for loss, _ in first] == [repr(loss) for loss, _ in second]


def spoil(trainer: Trainer, names: tuple[str, ...], value: float) -> list[Any]:
    """Fill the coming gradients of this rank's parameters of those names."""
    parameters = stage_of(trainer).trained.parameters

    def fill(gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, value)

    return [parameters[name].register_hook(fill) for name in names]


@measuring(never)  # Equal costs: stages of equally many sublayers.
def spoil_a_step(
    bad: dict[int, tuple[str, ...]], value: float, on_nonfinite: str, length: int
) -> tuple[str, list[str], bool]:
    """Spoil gradients of parameters, by rank, in one step.

    Returns:
        the error's text or "", this rank's warnings, and whether the weights of the steps around
            are right: those of the bad step as before it, and changed by the next one.
    """
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipetransformer").addHandler(handler)
    try:
        with make_trainer(on_nonfinite, length) as trainer:
            for _ in range(BAD_STEP):
                trainer.step()
            parameters = stage_of(trainer).trained.parameters
            before = [p.detach().clone() for p in parameters.values()]
            hooks = spoil(trainer, bad.get(trainer.world.rank, ()), value)
            try:
                # A user's hook on a parameter is refused; this one stands for what a kernel does.
                with mock.patch("pipetransformer.stage.stage_watch.has_hooks", return_value=False):
                    result = trainer.step()
            except NonFiniteError as error:
                return str(error), warnings, True
            assert result.skipped
            for hook in hooks:
                hook.remove()
            kept = all(map(torch.equal, before, parameters.values()))
            result = trainer.step()
            moved = not any(map(torch.equal, before, parameters.values()))
            return "", warnings, kept and moved and not result.skipped
    finally:
        logging.getLogger("pipetransformer").removeHandler(handler)


# Ranks 0 and 1 are the first pipeline of two stages, 2 and 3 the second; sublayer 3 is the first
# of the second stage.
CASES = [
    ({2: ("1.inner.weight",)}, NAN, 2, "in the gradient of sublayer '1' on rank 2"),
    ({3: ("4.norm.bias",), 0: ("2.norm.bias",)}, NAN, 2, "of sublayer '4' on rank 3"),
    ({1: ("5.1.bias",), 3: ("5.1.bias",)}, float("inf"), 2, "of sublayer '5' on ranks 1, 3"),
    ({1: ("0.weight",)}, NAN, 1, "in the gradient of sublayer '0' on rank 1"),
    ({3: ("5.1.weight",)}, NAN, 4, "in the gradient of sublayer '5' on rank 3"),
    ({1: ("0.bias",)}, 1e200, 1, "every single value is finite, but their sum is too large"),
    ({1: ("0.bias",), 2: ("0.bias",)}, 1.5e308, 1, "sublayer '0', in the sum over the replicas"),
]


@pytest.mark.parametrize("case", [slow(0), 1, *map(slow, (2, 3, 4)), 5, 6])
def test_a_bad_gradient_skips_the_step_everywhere_and_one_warning_names_where_it_began(
    four_ranks: Pool, case: int
) -> None:
    bad, value, length, where = CASES[case]
    answers = four_ranks.run(spoil_a_step, bad, value, "skip", length)
    assert [answer[0] for answer in answers] == [""] * 4
    assert all(answer[2] for answer in answers)
    warnings = [text for answer in answers for text in answer[1] if "skipped" in text]
    assert len(warnings) == 1 and warnings == [w for w in answers[0][1] if "skipped" in w]
    assert where in warnings[0], warnings
    assert warnings[0].startswith(f"step {BAD_STEP}: the loss is ")


def test_a_bad_gradient_ends_the_run_on_all_ranks_with_the_same_words(four_ranks: Pool) -> None:
    bad, value, length, where = CASES[0]
    texts = {answer[0] for answer in four_ranks.run(spoil_a_step, bad, value, "raise", length)}
    (text,) = texts
    assert where in text and "on_nonfinite='skip'" in text

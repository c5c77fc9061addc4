"""Prove that a model that trains wrongly is found, and that one that trains rightly passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from autopipe.loss import Loss
from pipetransformer import LayeredModel, Sublayer, Trainer, Verification, VerificationError
from pipetransformer.checks import verification
from pipetransformer.checks.twins import OwnForward
from pipetransformer.checks.verification import compare_with_own_forward
from tests.helpers.adapted import MODELS, batch_for, classifier, targets_for, timm_vit
from tests.helpers.any_models import KINDS, build, data, sgd
from tests.helpers.inspection import task_of
from tests.helpers.loops import TINY, Job, Result, loop, make_trainer
from tests.helpers.marks import slow
from tests.helpers.models import Entries, tiny_data, tiny_model
from tests.helpers.pool import Pool
from tests.helpers.unusual import Bounded, Running, decay_by_note, dropping, noted_model, repeated

QUICK = ("timm", "bert_sdpa", "modernbert", "distilbert_tokens")
UNSEEN = ["float64", "float64", ""]
"""What rank 0 says that has found nothing in float64."""
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64))


def batch_with_targets(model: nn.Module) -> dict[str, Tensor]:
    """Make a batch of a model, with targets for its own loss."""
    return {**batch_for(model), **targets_for(model)}


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else slow(name) for name in MODELS if name != "sequential"],
)
def test_every_adapter_s_model_passes(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    with Trainer(model, Entries(batch_with_targets(model)), progress=False) as trainer:
        passed = trainer.verify()
    rotates = name.startswith("modernbert")  # In float32, by frequencies that are no sublayer's.
    buffers = [] if rotates else model.buffers()
    dtype = "float32" if rotates else "float64"
    assert passed == Verification(dtype, 4, len([*model.parameters(), *buffers]))


@pytest.mark.parametrize("build", [classifier, timm_vit])
def test_a_smoothed_loss_and_rates_that_fall_by_layer_pass(build: Any) -> None:
    torch.manual_seed(0)
    model = build()
    settings = {"label_smoothing": 0.1, "layer_decay": 0.75, "progress": False}
    with Trainer(model, Entries(batch_with_targets(model)), **settings) as trainer:
        assert trainer.verify().dtype == "float64"


def frozen_and_verified(twins: bool) -> tuple[Any, list[float], dict[str, Tensor]]:
    """Verify a run that has frozen layers, with twins or without; train on."""
    torch.manual_seed(0)
    model = timm_vit()
    settings = {"freeze": [0, 1, 1], "epochs": 3, "global_batch_size": 2, "progress": False}
    with pytest.MonkeyPatch.context() as patch:
        if not twins:
            patch.setattr(verification, "_MOST_TWIN_BYTES", 1000)
            patch.setattr(verification, "make_twin", None)  # Nobody calls it.
        with Trainer(model, Entries(batch_with_targets(model)), **settings) as trainer:
            losses = [float(trainer.step().loss) for _ in range(3)]
            found = trainer.verify()
            while not trainer.is_over:
                losses.append(float(trainer.step().loss))
            return found, losses, {k: v.clone() for k, v in trainer.state_dict().items()}


def test_a_large_model_is_compared_as_it_is_and_trains_on() -> None:
    found, losses, weights = frozen_and_verified(twins=False)
    assert found == Verification("float32", 4, found.num_tensors, in_pipelines=False)
    other, expected, theirs = frozen_and_verified(twins=True)
    assert other == Verification("float64", 4, found.num_tensors)
    assert losses == expected
    torch.testing.assert_close(weights, theirs, rtol=0, atol=0)


def verify(job: Job) -> str:
    """Verify a job's model on this world, and return what is found."""
    with make_trainer(job) as trainer:
        try:
            return str(trainer.verify())
        except VerificationError as error:
            return str(error)


@pytest.mark.parametrize("build", [dropping, repeated])
def test_what_trains_rightly_passes_on_every_rank(two_ranks: Pool, build: Any) -> None:
    for found in two_ranks.run(verify, replace(TINY, build=build)):
        assert found.startswith("Verification(dtype='float64', num_samples=4")


def verify_with_forgotten_notes(job: Job) -> str:
    """Verify with layers that lose what is noted on their parameters where they move."""

    def put(self: LayeredModel, name: str, fresh: Tensor) -> None:
        for module, attribute in self._slots[name]:
            setattr(module, attribute, fresh)

    convert = LayeredModel.convert

    def converted(self: LayeredModel, dtype: torch.dtype) -> None:
        notes = {name: vars(p) for name, p in self.model.named_parameters()}
        convert(self, dtype)
        for name, parameter in self.model.named_parameters():
            vars(parameter).update(notes[name])

    with (
        mock.patch.object(LayeredModel, "_put", put),
        mock.patch.object(LayeredModel, "convert", converted),
    ):
        return verify(job)


def test_lost_notes_on_parameters_are_found(two_ranks: Pool) -> None:
    job = Job(noted_model, tiny_data, decay_by_note, settings=TINY.settings)
    alone = verify_with_forgotten_notes(job)
    for found in (alone, *two_ranks.run(verify_with_forgotten_notes, job)):
        assert "the weight '1.inner.weight' differs after the update" in found


def test_a_forward_that_writes_is_found() -> None:
    for layer, tensor in ((Running, "1.norm.running_mean"), (Bounded, "1.table.weight")):
        model = nn.Sequential(nn.Linear(8, 8), layer(), nn.Linear(8, 3)).double()
        found = verify(replace(TINY, build=lambda model=model: model))
        assert f"the forward writes into '{tensor}'" in found


def test_a_forward_that_writes_is_found_in_pipelines(two_ranks: Pool) -> None:
    for found in two_ranks.run(verify_running_unseen):
        assert found.startswith("in step 0 (K x R = 2 x 1) the buffer '1.norm.running_")


def verify_running_unseen() -> str:
    """Verify running statistics with nothing but pipelines to find them."""
    with (
        mock.patch("pipetransformer.checks.verification._verify_locally", return_value=UNSEEN),
        mock.patch("pipetransformer.stage.stage.StageWatch.find_written", return_value=""),
    ):
        return verify(replace(TINY, build=running))


def running() -> nn.Module:
    """Build a model with running statistics."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Running(), nn.Linear(8, 3)).double()


def believed(given: Any, own: Any, *, model: str) -> Loss:
    """Take any loss as it is."""
    return Loss(given, is_exact=True)


def test_a_loss_that_depends_on_the_split_is_found() -> None:
    with mock.patch("pipetransformer.checks.model_checks.choose_loss", believed):
        found = verify(replace(TINY, loss_fn=WEIGHTED))
        assert "the loss 'CrossEntropyLoss' depends on how a batch is split" in found
        assert "when joined from parts" in found
        with mock.patch(
            "pipetransformer.checks.verification._verify_locally", return_value=UNSEEN
        ):
            found = verify(replace(TINY, loss_fn=WEIGHTED))
    assert found.startswith("in step 0 (K x R = 1 x 1) the loss is")
    assert verify(replace(TINY, loss_fn=WEIGHTED)).startswith("Verification")


class Centred(nn.Module):
    """Subtract what the samples of a batch have in common."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(dim=0)


def test_a_layer_that_mixes_samples_is_found() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Centred(), nn.Linear(8, 3)).double()
    found = verify(replace(TINY, build=lambda: model))
    assert "the output of sublayer '1' depends on how a batch is split" in found


class Squared(nn.Module):
    """A model whose forward does more than its children in order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(self.first(x)) ** 2)
        return result


@pytest.mark.parametrize("most_bytes", [verification._MOST_TWIN_BYTES, 0])
def test_sublayers_that_leave_something_out_are_found(
    most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "_MOST_TWIN_BYTES", most_bytes)
    model = Squared().double()
    children = enumerate(model.named_children())
    sublayers = [Sublayer(name, layer, module) for layer, (name, module) in children]
    layered = LayeredModel(model, sublayers, inputs=("x",), targets=("y",))
    found = verify(replace(TINY, build=lambda: layered))
    assert "the model's own forward and its sublayers in order give other outputs" in found
    assert "first in the output of 'head'" in found


def test_an_unused_parameter_is_no_difference() -> None:
    model = tiny_model()
    model[1].unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    assert verify(replace(TINY, build=lambda: model)).startswith("Verification")


def train_and_verify(job: Job) -> Result:
    """Verify after every step."""
    with make_trainer(job) as trainer:
        losses = []
        while not trainer.is_over:
            losses.append(trainer.step().loss)
            before = torch.get_rng_state()
            trainer.verify()
            assert torch.equal(torch.get_rng_state(), before)
        weights = {name: t.clone() for name, t in trainer.state_dict().items()}
    return Result(losses, weights, {})


def train_and_verify_as_it_is(job: Job) -> Result:
    with mock.patch.object(verification, "_MOST_TWIN_BYTES", 0):
        return train_and_verify(job)


@pytest.mark.parametrize("work", [train_and_verify, train_and_verify_as_it_is])
def test_a_run_is_as_it_was(work: Callable[[Job], Result], two_ranks: Pool) -> None:
    job = replace(TINY, frozen=(0, 1), settings={"pipeline_length": 2, "global_batch_size": 13})
    expected = loop(job)
    result = two_ranks.run(work, job)[0]
    assert result.losses == pytest.approx(expected.losses, rel=1e-9)
    for name, tensor in result.weights.items():
        torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-7, atol=1e-9)


def test_what_cannot_be_called_or_split_is_said() -> None:
    model = tiny_model()
    layered = LayeredModel(
        nn.ModuleList(model),
        [Sublayer(str(layer), layer, child) for layer, child in enumerate(model)],
        inputs=("x",),
        targets=("y",),
    )
    assert "the model's own forward could not be called" in verify(
        replace(TINY, build=lambda: layered)
    )
    x, y = tiny_data().tensors
    one = {"x": x[:1], "y": y[:1]}
    with make_trainer(TINY) as trainer, pytest.raises(ValueError, match="samples cannot be split"):
        trainer.verify(one)


class Single(nn.Module):
    """Compute in float32 whatever comes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.mm(hidden, torch.eye(8))


def test_a_model_of_another_precision_is_verified_in_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Single(), nn.Linear(8, 3))
    job = Job(
        lambda: model,
        lambda: tiny_data(dtype=torch.float32),
        lambda named: SGD([p for _, p in named], lr=0.1),
        settings=TINY.settings,
    )
    assert verify(job).startswith("Verification(dtype='float32'")


@pytest.mark.parametrize(
    ("dtype", "gap", "found"),
    [
        (torch.float64, 0.0, ""),
        (torch.float64, 1e-12, ""),
        (torch.float64, 1e-3, "sublayers in order give other outputs"),
        (torch.float32, 1e-6, ""),
        (torch.float32, 1e-2, "sublayers in order give other outputs"),
        (torch.bfloat16, 1e-2, ""),
        (torch.bfloat16, 0.5, "sublayers in order give other outputs"),
    ],
)
def test_a_recorded_model_is_compared_to_its_weights_rounding(
    dtype: torch.dtype, gap: float, found: str
) -> None:
    kind = KINDS["gpt2"]
    model = build(kind).to(dtype)
    run = LayeredModel.run

    def off(self: LayeredModel, batch: Any) -> Tensor:
        return run(self, batch) * (1 + gap)

    with Trainer(model, data(kind), optimizer=sgd, progress=False) as trainer:
        task = task_of(trainer)
        batch = dict(data(kind)[:2])
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with mock.patch.object(LayeredModel, "run", off):
            comparison = compare_with_own_forward(task, OwnForward(task.model, None), batch)
    assert found in comparison.difference and bool(found) == bool(comparison.difference)
    assert comparison.is_exact == (gap == 0)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_that_a_sublayer_does_not_hand_on_is_found() -> None:
    kind = KINDS["gpt2"]
    run = LayeredModel.run

    def cut(self: LayeredModel, batch: Any) -> Tensor:
        first = next(p for n, p in self.model.named_parameters() if n.endswith("wpe.weight"))
        first.requires_grad_(False)
        output = run(self, batch)
        first.requires_grad_(True)
        return output

    with Trainer(build(kind), data(kind), optimizer=sgd, progress=False) as trainer:
        task = task_of(trainer)
        with mock.patch.object(LayeredModel, "run", cut):
            found = compare_with_own_forward(
                task, OwnForward(task.model, None), dict(data(kind)[:2])
            )
    assert (
        "'transformer.wpe.weight' has no gradient, unlike in its own forward" in found.difference
    )

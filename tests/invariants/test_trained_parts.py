"""A Trainer whose parts are frozen trains as by hand, reads their rows, or refuses them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import default_collate

from pipetransformer import LayeredModel, Sublayer, Trainer
from pipetransformer.hf import Trainer as HFTrainer
from pipetransformer.model import adapt
from tests.helpers.hf_runs import arguments
from tests.helpers.marks import slow
from tests.helpers.part_models import CASES, NUM_SAMPLES, PartCase
from tests.helpers.pool import Pool

_EPOCHS, _BATCH = 3, 4

_TRAINED = (
    slow("resnet"), "three taps", slow("llava"), "whisper",
    slow("bart"), slow("t5"), slow("wav2vec2"),
)  # fmt: skip
_UNEQUAL = (slow("bart, padded texts"), "llava, padded texts", slow("whisper, padded labels"))


def _sgd(named: Any) -> SGD:
    return SGD([parameter for _, parameter in named], lr=0.1)


def _order(epoch: int) -> Tensor:
    return torch.arange(NUM_SAMPLES).roll(epoch)


def _built(case: PartCase) -> nn.Module:
    torch.manual_seed(1)
    model = case.build()
    for module in model.modules():  # A plain loop would draw other masks.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        own = vars(module)
        own.update({n: 0.0 for n, one in own.items() if "drop" in n and isinstance(one, float)})
    return model


def _data(case: PartCase) -> Any:
    torch.manual_seed(0)
    return case.data()


def _by_hand(model: nn.Module, case: PartCase) -> list[float]:
    """Train in a plain loop, with parts frozen and in eval mode."""
    parts, data = [model.get_submodule(name) for name in case.parts], _data(case)
    model.train()
    for part in parts:
        part.requires_grad_(False).eval()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for epoch in range(_EPOCHS):
        for ids in _order(epoch).split(_BATCH):
            batch = (case.collate or default_collate)([data[index] for index in ids.tolist()])
            optimizer.zero_grad()
            loss = case.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def _settings(case: PartCase, **others: Any) -> dict[str, Any]:
    has_loss = "y" not in _data(case)[0]
    return {
        "epochs": _EPOCHS,
        "global_batch_size": _BATCH,
        "parts": case.parts,
        "collate_fn": case.collate,
        "loss_fn": None if has_loss else F.cross_entropy,
        "sample_order": _order,
        "optimizer": _sgd,
        "device": "cpu",
        "progress": False,
        **others,
    }


def _count_runs(model: nn.Module, name: str) -> list[int]:
    """Count a module's runs, but not by a hook, which would wait for calls that do not come."""
    runs, module = [0], model.get_submodule(name)

    def counted(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        return run(*args, **kwargs)

    module.forward = partial(counted, module.forward)
    return runs


def _trained(
    model: nn.Module, case: PartCase, **settings: Any
) -> tuple[list[float], list[int], list[int]]:
    """Train; return losses, and by epochs the hits and the runs of a module within a part."""
    losses, hits, ran = list[float](), [0], list[int]()
    with Trainer(model, _data(case), **_settings(case, **settings)) as trainer:
        trainer.begin()
        runs = _count_runs(model, case.sees[-1])
        for _ in range(_EPOCHS):
            runs[0] = 0
            for _ in range(NUM_SAMPLES // _BATCH):
                losses.append(trainer.step().loss)
            ran.append(runs[0])
            hits.append(trainer.report.cache_hits)
    return losses, [b - a for a, b in zip(hits, hits[1:], strict=False)], ran


def _assert_same(one: nn.Module, other: nn.Module, **rounding: float) -> None:
    mine, others = one.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], others[name], **{"rtol": 0, "atol": 0, **rounding})


@pytest.mark.parametrize("name", _TRAINED)
def test_parts_are_read_and_train_as_without_a_cache_and_by_hand(name: str) -> None:
    case = CASES[name]
    model = _built(case)
    plain, uncached = copy.deepcopy(model), copy.deepcopy(model)
    losses, hits, ran = _trained(model, case)
    assert (hits[-1], ran[-1]) == (NUM_SAMPLES, 0) and ran[0] > 0
    expected, none, always = _trained(uncached, case, cache=False)
    assert losses == expected and not any(none) and all(always)
    _assert_same(model, uncached)
    # Our losses of transformers' models sum in another order.
    assert losses == pytest.approx(_by_hand(plain, case), rel=1e-5)
    _assert_same(model, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", _UNEQUAL)
def test_parts_beside_texts_of_unequal_lengths_run_at_every_step(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    model = _built(case)
    plain = copy.deepcopy(model)
    losses, hits, ran = _trained(model, case)
    assert not any(hits) and all(ran)
    assert "no cache: samples have unequal shapes of" in caplog.text
    assert losses == pytest.approx(_by_hand(plain, case), rel=1e-5)
    _assert_same(model, plain, rtol=1e-5, atol=1e-6)


def _replicated(name: str, settings: dict[str, Any]) -> tuple[list[float], list[int], Any]:
    model = _built(CASES[name])
    losses, hits, ran = _trained(model, CASES[name], **settings)
    assert all(ran) if settings else ran[-1] == 0
    return losses, hits, model.state_dict()


@pytest.mark.parametrize("name", [slow("resnet"), "llava"])
def test_replicas_of_one_stage_read_parts_rows(two_ranks: Pool, name: str) -> None:
    (losses, hits, cached), (_, more, _) = two_ranks.run(_replicated, name, {})
    (expected, none, uncached), _ = two_ranks.run(_replicated, name, {"cache": False})
    assert hits[-1] == more[-1] == NUM_SAMPLES and not any(none)
    assert losses == expected
    assert cached.keys() == uncached.keys()
    assert all(torch.equal(cached[n], uncached[n]) for n in cached)
    plain = _built(CASES[name])
    assert losses == pytest.approx(_by_hand(plain, CASES[name]), rel=1e-5)
    for tensor_name, tensor in plain.state_dict().items():
        torch.testing.assert_close(cached[tensor_name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{"precision": "bf16"}, slow({"micro_batch_size": 2}), slow({"num_workers": 1})],
    ids=str,
)
def test_settings_of_a_run_change_nothing_between_rows_and_parts(
    settings: dict[str, Any],
) -> None:
    case = CASES["llava"]
    model = _built(case)
    uncached = copy.deepcopy(model)
    losses, hits, _ = _trained(model, case, **settings)
    assert hits[-1] == NUM_SAMPLES
    assert losses == _trained(uncached, case, cache=False, **settings)[0]
    _assert_same(model, uncached)


def test_a_later_run_reads_kept_rows_of_parts(tmp_path: Path) -> None:
    case = CASES["llava"]
    kept = {"cache_folder": tmp_path, "cache_keep": True}
    model = _built(case)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    _trained(model, case, cache=False)
    assert _trained(first, case, **kept)[1][0] < NUM_SAMPLES
    assert _trained(second, case, **kept)[1][0] == NUM_SAMPLES
    _assert_same(first, model)
    _assert_same(second, model)


def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    case = CASES["llava"]
    whole = _built(case)
    saving = {"folder": tmp_path, "checkpoint_every_steps": 1, "resume": "auto"}
    with Trainer(copy.deepcopy(whole), _data(case), **_settings(case, **saving)) as trainer:
        for _ in range(4):
            trainer.step()
    resumed = copy.deepcopy(whole)
    with Trainer(resumed, _data(case), **_settings(case, **saving)) as trainer:
        trainer.fit()
    _trained(whole, case)
    _assert_same(resumed, whole)


def test_evaluations_and_predictions_are_the_models_own() -> None:
    case = CASES["resnet"]
    model, data = _built(case), _data(case)
    settings = _settings(case, eval_dataset=[data[index] for index in range(NUM_SAMPLES)])
    with Trainer(model, data, **settings) as trainer:
        trainer.fit()
        found, outputs = trainer.evaluate(), trainer.predict(data).predictions
    batch = default_collate([data[index] for index in range(NUM_SAMPLES)])
    with torch.no_grad():
        expected = model.eval()(batch["x"])
    torch.testing.assert_close(torch.as_tensor(outputs), expected, rtol=1e-5, atol=1e-6)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(expected, batch["y"])), rel=1e-5)


def test_the_model_is_given_back_with_its_parts_frozen() -> None:
    case = CASES["resnet"]
    model = _built(case).eval()
    with Trainer(model, _data(case), **_settings(case)) as trainer:
        trainer.fit()
    assert not any(p.requires_grad for p in model.get_submodule("backbone").parameters())
    assert all(p.requires_grad for p in model.get_submodule("head").parameters())
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", [slow("resnet"), "llava"])
def test_a_model_with_parts_is_verified(name: str) -> None:
    case = CASES[name]
    with Trainer(_built(case), _data(case), **_settings(case)) as trainer:
        assert trainer.verify().num_tensors > 0


def _verified(name: str) -> int:
    case = CASES[name]
    with Trainer(_built(case), _data(case), **_settings(case)) as trainer:
        return trainer.verify().num_tensors


def test_a_model_with_parts_is_verified_over_replicas(two_ranks: Pool) -> None:
    assert all(two_ranks.run(_verified, "llava"))


def test_the_interface_of_transformers_freezes_parts(tmp_path: Path) -> None:
    case = CASES["llava"]

    def run(cache: bool) -> tuple[nn.Module, int]:
        model = _built(case)
        args = arguments(tmp_path / str(cache), num_train_epochs=3, eval_strategy="no")
        trainer = HFTrainer(model, args, train_dataset=_data(case), parts=case.parts, cache=cache)
        with closing(trainer):
            trainer.train()
            return model, trainer._begun().report.cache_hits

    (cached, hits), (uncached, none) = run(True), run(False)
    assert hits >= 2 * NUM_SAMPLES and none == 0
    _assert_same(cached, uncached)


class _Around(nn.Module):
    """A head on a tower; others do something around it."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.head = nn.Linear(6, 6), nn.Linear(4, 5)
        self.tower, self.drop = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.tower(x))
        return answer


def _changed(forward: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    kind = type("Changed", (_Around,), {"forward": forward})
    return lambda: kind()


def _without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        below = self.below(x)
    answer: Tensor = self.head(self.tower(below)) + self.below(x)[:, :5]
    return answer


def _hooked() -> nn.Module:
    model = _Around()
    model.tower[0].register_forward_hook(lambda *_: None)
    return model


_REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "learned": (_changed(lambda m, x: m.head(m.tower(m.below(x)))), "goes on learning"),
    "learned, no gradient": (_changed(_without_gradient), "'below.weight' and 1 more"),
    "other samples": (
        _changed(lambda m, x: m.head(m.tower(x - x.mean(0)))), "in training the model",
    ),
    "dropout below": (_changed(lambda m, x: m.head(m.tower(m.drop(x)))), "in training the model"),
    "training below": (
        _changed(lambda m, x: m.head(m.tower(x * (1 + m.training)))), "in training the model"
    ),
    "a hook within": (_hooked, "a hook on '0' within waits for calls"),
    "called twice": (_changed(lambda m, x: m.head(m.tower(x) + m.tower(-x))), "2 times"),
    "not called": (_changed(lambda m, x: m.head(x[:, :4])), "not at all"),
    "a sum of samples": (
        _changed(lambda m, x: m.head(m.tower(x.sum(0, keepdim=True))).expand(len(x), 5)),
        "other numbers of entries|one entry a sample",
    ),
}  # fmt: skip


def _rows() -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [{"x": torch.randn(6), "y": torch.tensor(i % 5)} for i in range(NUM_SAMPLES)]


def _around(build: Callable[[], nn.Module], **settings: Any) -> Trainer:
    torch.manual_seed(1)
    usual = {"loss_fn": F.cross_entropy, "parts": ["tower"], "device": "cpu", "progress": False}
    return Trainer(build(), _rows(), **{"global_batch_size": 4, **usual, **settings})


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", _REFUSED)
def test_parts_whose_rows_would_be_wrong_are_refused(name: str, cache: bool) -> None:
    build, why = _REFUSED[name]
    with pytest.raises(ValueError, match=why):
        _around(build, cache=cache)


def test_a_checkpoint_around_a_part_is_refused() -> None:
    # It would run the part again, on images that the rest is not given.
    def forward(self: Any, x: Tensor) -> Tensor:
        run = lambda v: self.head(self.tower(v.flatten(1))).tanh()  # noqa: E731
        answer: Tensor = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
        return answer

    images = [{**one, "x": one["x"].view(1, 2, 3)} for one in _rows()]
    trainer = Trainer(
        _changed(forward)(), images, loss_fn=F.cross_entropy, parts=["tower"], device="cpu"
    )
    with trainer, pytest.raises(ValueError, match="cannot be trained in parts"):
        trainer.step()


def test_a_part_that_is_called_twice_later_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.tower(x)
        answer: Tensor = self.head(hidden + self.tower(-x) if vars(self).get("late") else hidden)
        return answer

    model = _changed(forward)()
    with _around(lambda: model) as trainer:
        trainer.step()
        model.late = True  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="parts must be called once in each forward"):
            trainer.step()


def test_images_of_another_shape_than_the_first_are_refused() -> None:
    images = _data(CASES["resnet"]).columns
    batch = {name: column[:2] for name, column in images.items()}
    model = _built(CASES["resnet"])
    layered = adapt(model, lambda _: batch, loss_fn=F.cross_entropy, parts=["backbone"])
    assert layered.run(batch).shape == (2, 5)
    with pytest.raises(ValueError, match="give all samples one shape"):
        layered.run({**batch, "x": batch["x"][..., :16]})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"freeze": 1}, "freezes \\['tower'\\] and nothing else, and freeze= is 1"),
        ({"pipeline_length": 2}, "one stage runs.*leave pipeline_length=2 out"),
        ({"stage_workers": (1, 1)}, "leave stage_workers out"),
        ({"plan": "pipedream"}, "leave plan='pipedream' out"),
        ({"weight_versions": "stashed"}, "leave weight_versions out"),
        ({"compile": True}, "leave compile out"),
        ({"parts": ["towr"]}, "did you mean 'tower'"),
        ({"parts": "tower"}, "a list of names"),
        ({"parts": ["tower", "tower.0"]}, "lies within another one"),
        ({"parts": [""]}, "the model itself"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_parts_are_refused(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        _around(_Around, **settings)


def test_a_layered_model_has_no_parts() -> None:
    model = _Around()
    sublayers = [Sublayer("0", 0, model.tower), Sublayer("1", 1, model.head)]
    unused = ["below.weight", "below.bias"]
    layered = LayeredModel(model, sublayers, inputs=["x"], targets=["y"], unused=unused)
    with pytest.raises(TypeError, match="give the model itself"):
        Trainer(layered, _rows(), loss_fn=F.cross_entropy, parts=["tower"])


def test_rows_of_several_tensors_are_not_rounded() -> None:
    case = CASES["llava"]
    with pytest.raises(ValueError, match="rounds rows of a single tensor"):
        Trainer(_built(case), _data(case), **_settings(case, cache_dtype="bfloat16"))


def test_a_part_of_any_number_of_entries_is_left_to_a_loop() -> None:
    case = CASES["smolvlm, one to three tiles"]
    with pytest.raises(ValueError, match="by attach\\(model, parts"):
        Trainer(_built(case), _data(case), **_settings(case))

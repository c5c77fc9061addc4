"""Frozen parts leave their device while rows take their place, and nothing else changes."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from autocache import fingerprint
from pipetransformer import FreezeCallback, attach
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.marks import slow
from tests.helpers.part_models import CASES
from tests.helpers.pool import Pool
from tests.helpers.stand_in_gpu import CUDA, put_on_gpu, stand_in_gpu

_NUM, _BATCH = 8, 4
_CPU = torch.device("cpu")
RUNS = list[int]()
"""Sizes of the batches that towers have run on; what a module notes itself is not cached."""


class Tower(nn.Module):
    """Have a weight and a buffer of its own, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))
        self.register_buffer("shift", torch.randn(16))
        self.first, self.norm, self.last = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 64)
        self.norm.running_mean.normal_()

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(len(x))
        answer: Tensor = self.last(self.norm(self.first(x) * self.scale + self.shift).relu())
        return answer


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(64, 5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.tower(x))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels)}


def _built() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def _samples(seed: int = 1) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    return [{"x": torch.randn(12), "labels": i % 5} for i in range(_NUM)]


def _loader(samples: list[dict[str, Any]]) -> DataLoader[Any]:
    return DataLoader(samples, _BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))


@contextmanager
def _attached(model: nn.Module, folder: Path, **settings: Any) -> Iterator[Any]:
    usual = {"parts": ["tower"], "release": True, "cache": True, "cache_folder": folder}
    with attach(model, **{**usual, **settings}) as cached:
        yield cached


def _train(
    model: nn.Module, cached: Any, loader: Any, num_epochs: int = 1, device: torch.device = _CPU
) -> list[Tensor]:
    """Train by plain descent; return the losses."""
    losses = []
    for batch in (batch for _ in range(num_epochs) for batch in cached.epoch(loader)):
        loss = F.cross_entropy(model(batch["x"].to(device)), batch["labels"].to(device))
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.1)
                    parameter.grad = None
        losses.append(loss.detach().cpu())
    return losses


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _values(model: nn.Module) -> list[Tensor]:
    return [one.detach().cpu().clone() for one in _tensors(model)]


class Moves:
    """Count in the log how often parts have left, and come back."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._log = caplog

    def __call__(self) -> tuple[int, int]:
        said = [one.getMessage() for one in self._log.records]
        return sum(" left c" in one for one in said), sum(" came back " in one for one in said)


@pytest.fixture
def moves(caplog: pytest.LogCaptureFixture) -> Moves:
    return Moves(caplog)


@pytest.fixture(params=[slow("cpu"), "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Give a CPU, and a stand-in for a GPU."""
    if request.param == "cpu":
        yield _CPU
        return
    with stand_in_gpu():
        yield CUDA


def _built_on(device: torch.device) -> Classifier:
    model = _built()
    if device == CUDA:
        put_on_gpu(model)
    return model


def test_a_complete_set_frees_the_parts_memory_and_changes_no_number(
    device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = []
    for release in (False, True):
        model = _built_on(device)
        loader, own, living = (
            _loader(_samples()),
            _tensors(model),
            LiveBytes(_tensors(model.tower)),
        )
        total, kept = living.now(), model.tower.scale.untyped_storage().nbytes()
        with _attached(model, tmp_path, release=release) as cached:
            losses = _train(model, cached, loader, 2, device)
            assert living.now() == (kept if release else total)
            RUNS.clear()
            losses += _train(model, cached, loader, 1, device)
            assert (cached.stats.hits, RUNS) == (_NUM, [])
            assert next(model.parameters()).device == device
        assert [*map(id, _tensors(model))] == [*map(id, own)]
        assert {one.device for one in own} == {device}
        found.append([*losses, *_values(model)])
    assert all(map(torch.equal, *found))
    assert f"{total - kept} bytes" in caplog.text


@pytest.mark.parametrize("name", ["t5", slow("whisper"), slow("siglip, both"), slow("resnet")])
def test_weights_that_are_used_beside_the_part_stay(name: str, tmp_path: Path) -> None:
    case, found = CASES[name], []
    for release in (False, True):
        torch.manual_seed(0)
        model = case.build()
        loader = DataLoader(case.data(), batch_size=_BATCH, collate_fn=case.collate)
        named = dict(model.named_parameters(remove_duplicate=False))
        inner = {name for name in named if name.startswith(case.parts)}
        beside = {id(one) for name, one in named.items() if name not in inner}
        trained = [p for n, p in model.named_parameters() if n not in {*inner, "shared.weight"}]
        optimizer, losses = torch.optim.SGD(trained, lr=0.01), []
        places = {name: one.data_ptr() for name, one in named.items()}
        settings = {"cache_folder": tmp_path, "cache": True, "release": release}
        with attach(model, parts=case.parts, **settings) as cached:
            for _ in range(2):
                torch.manual_seed(2)
                for batch in cached.epoch(loader):
                    optimizer.zero_grad()
                    loss = case.loss(model, batch)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
            assert cached.stats.hits == len(case.data())
            moved = {name for name in named if named[name].data_ptr() != places[name]}
        firsts = {next(n for n in named if n.startswith(part)) for part in case.parts}
        away = {name for name in inner - firsts if id(named[name]) not in beside}
        assert moved == (away if release else set())
        found.append([*losses, *_values(model)])
    assert all(map(torch.equal, *found))


def _hooks(model: nn.Module) -> set[str]:
    """Name the modules whose hooks a model's parts have."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks")
    hooks = (hook for m in model.modules() for name in names for hook in vars(m)[name].values())
    return {type(hook).__module__ for hook in hooks}


def test_a_teachers_weights_that_its_student_shares_stay(tmp_path: Path) -> None:
    teacher = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 64), nn.Linear(64, 5))
    student = nn.Sequential(nn.Linear(12, 64), teacher[3])
    places = [one.data_ptr() for one in teacher.parameters()]
    optimizer, loader = torch.optim.SGD(student[0].parameters(), lr=0.1), _loader(_samples())
    with _attached(student, tmp_path, parts=[teacher]) as cached:
        for batch in (batch for _ in range(3) for batch in cached.epoch(loader)):
            told = teacher(batch["x"]).softmax(1)
            F.cross_entropy(student(batch["x"]), told).backward()
            optimizer.step()
        assert cached.stats.hits == _NUM
        stays = [one.data_ptr() in places for one in teacher.parameters()]
    assert stays == [True, False, False, False, True, True]


def test_a_teacher_is_whole_for_its_copy_and_for_a_look(
    device: torch.device, moves: Moves, tmp_path: Path
) -> None:
    model, loader, other = _built_on(device), _loader(_samples()), _loader(_samples(7))
    teacher, student, plain = model.tower, model.head, _built_on(device).tower.eval()
    with _attached(student, tmp_path, parts=[teacher]) as cached:
        for batch in (batch for _ in range(3) for batch in cached.epoch(loader)):
            teacher(batch["x"].to(device))
        copied = copy.deepcopy(teacher)
        assert {one.device for one in _tensors(copied)} == {device}
        assert all(map(torch.equal, _values(copied), _values(teacher)))
        for evaluation in (cached.epoch(loader), cached.evaluation(other)):
            for batch in evaluation:
                x = batch["x"].to(device)
                assert torch.equal(teacher(x).cpu(), plain(x).cpu())
        assert moves() == (2, 2)
    assert _hooks(teacher) == {"freeze.in_place"}


class _Twofold(Classifier):
    """Use a module of the part beside it, too."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return self.head(self.tower(x)) + self.tower.last(x.repeat(1, 2)[:, :16]).mean()


def test_a_module_that_runs_beside_its_part_brings_it_back(
    device: torch.device, moves: Moves, tmp_path: Path
) -> None:
    found = []
    for release in (False, True):
        torch.manual_seed(0)
        model, loader = _Twofold(), _loader(_samples())
        if device == CUDA:
            put_on_gpu(model)
        with _attached(model, tmp_path, release=release) as cached:
            losses = _train(model, cached, loader, 3, device)
            assert cached.stats.hits == _NUM
        found.append([*losses, *_values(model)])
    assert moves() == (3, 3)  # The last time at the end.
    assert all(map(torch.equal, *found))


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(64, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        hidden = self.tower(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def test_a_part_leaves_beside_blocks_that_freeze(
    device: torch.device, moves: Moves, tmp_path: Path
) -> None:
    found = []
    for release in (False, True):
        torch.manual_seed(0)
        model, loader = _Deep(), _loader(_samples())
        if device == CUDA:
            put_on_gpu(model)
        settings = {"freeze": [0, 0, 2, 2], "release": release}
        with _attached(model, tmp_path, **settings) as cached:
            losses = _train(model, cached, loader, 4, device)
            assert (cached.stats.hits, cached.num_frozen) == (_NUM, 2)
        found.append([*losses, *_values(model)])
    # Back for the look at what the blocks return, and at the end.
    assert moves() == (2, 2)
    assert all(map(torch.equal, *found))


def test_what_somebody_holds_stays_and_an_edit_by_it_is_noticed(
    moves: Moves, tmp_path: Path
) -> None:
    found = []
    for release in (False, True):
        model = _built()
        held, loader = model.tower.last.weight.data[3:], _loader(_samples())
        with _attached(model, tmp_path, release=release) as cached:
            _train(model, cached, loader, 2)
            held.mul_(2)
            _train(model, cached, loader, 2)
        assert held.data_ptr() == model.tower.last.weight[3:].data_ptr()
        found.append(_values(model))
    assert moves()[0] == 2
    assert all(map(torch.equal, *found))


def test_weights_that_share_memory_go_on_to(moves: Moves, tmp_path: Path) -> None:
    model, loader = _built(), _loader(_samples())
    weight, bias = model.tower.first.weight, model.tower.first.bias
    memory = torch.randn(16 + 12 * 16)
    bias.data, weight.data = memory[:16], memory[16:].view(12, 16).T
    del memory
    expected, places = _values(model.tower), [bias.data_ptr()]
    with _attached(model, tmp_path) as cached:
        _train(model, cached, loader)
        places.append(bias.data_ptr())
        assert weight.data_ptr() == bias.data_ptr() + 16 * 4
    assert places[1] not in (places[0], bias.data_ptr())
    assert weight.data_ptr() == bias.data_ptr() + 16 * 4
    assert weight.stride() == (1, 16)
    assert moves() == (1, 1)
    assert all(map(torch.equal, _values(model.tower), expected))


def test_a_changed_sample_brings_the_part_back(moves: Moves, tmp_path: Path) -> None:
    found = []
    for release in (False, True):
        model, samples = _built(), _samples()
        with _attached(model, tmp_path, release=release) as cached:
            losses = _train(model, cached, loader := _loader(samples), 2)
            samples[3]["x"] = samples[3]["x"] + 1
            losses += _train(model, cached, loader, 2)
            assert cached.stats.hits == _NUM
        found.append([*losses, *_values(model)])
    assert moves() == (2, 2)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("device", "inference"), [("cpu", False), ("cpu", True), ("cuda", False)], indirect=["device"]
)
def test_an_evaluation_needs_the_part_for_its_first_rows_alone(
    inference: bool,
    device: torch.device,
    moves: Moves,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, plain, held_out = _built_on(device), _built_on(device), _samples(7)
    loader, other = _loader(_samples()), DataLoader(held_out, _BATCH)
    more = DataLoader(list(held_out), _BATCH)
    x = torch.stack([one["x"] for one in held_out])
    plain.tower.eval()

    def check(evaluation: Any) -> None:
        with torch.no_grad():
            plain.head.weight.copy_(model.head.weight)
            plain.head.bias.copy_(model.head.bias)
        with torch.inference_mode(inference):
            answers = [model(batch["x"].to(device)).cpu() for batch in evaluation]
            assert torch.equal(torch.cat(answers), plain(x.to(device)).cpu())

    with _attached(model, tmp_path) as cached:
        for _ in cached.epoch(loader):
            check(cached.evaluation(other))
            assert moves() == (0, 0)  # However complete the evaluation's rows are.
        _train(model, cached, loader, 1, device)
        check(cached.evaluation(more))
        assert moves() == (1, 1)
        _train(model, cached, loader, 1, device)
        check(cached.evaluation(more))
        assert moves() == (2, 1)
        check(other)
        assert moves() == (2, 2)
        assert not any(one.is_inference() for one in _tensors(model))
        _train(model, cached, loader, 1, device)
        assert (cached.stats.hits, moves()) == (_NUM, (3, 2))
    assert "weights of frozen layers" not in caplog.text


def test_a_module_within_a_part_brings_it_back(moves: Moves, tmp_path: Path) -> None:
    model, hidden = _built(), torch.randn(2, 16)
    expected = model.tower.last(hidden)
    with _attached(model, tmp_path) as cached:
        _train(model, cached, _loader(_samples()), 2)
        assert torch.equal(model.tower.last(hidden), expected)
        assert moves() == (1, 1)


def test_an_exception_and_the_end_bring_it_back(
    moves: Moves, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, loader, places = _built(), _loader(_samples()), list[int]()
    before = model.tower.last.weight.data_ptr()
    with pytest.raises(KeyError, match="own"), _attached(model, tmp_path) as cached:
        _train(model, cached, loader, 2)
        begun = cached.epoch(loader)
        next(begun)
        places.append(model.tower.last.weight.data_ptr())
        raise KeyError("own")
    begun.close()
    assert places != [before] and moves() == (1, 1)
    assert _hooks(model) == {"freeze.in_place"}  # It stays frozen.
    assert caplog.text.count("parts stay on their device") == 1
    living = LiveBytes(_tensors(model.tower))
    assert living.now() == sum(t.untyped_storage().nbytes() for t in _tensors(model.tower))
    assert [*tmp_path.iterdir()] == []


_TAKEN: dict[str, Callable[[Classifier, Path], Any]] = {
    "state_dict": lambda model, _: model.state_dict(),
    "the part's state_dict": lambda model, _: model.tower.state_dict(prefix="tower."),
    "save": lambda model, folder: _stored(model.state_dict(), folder),
    "save whole": lambda model, folder: _stored(model, folder).state_dict(),
    "deepcopy": lambda model, _: copy.deepcopy(model).state_dict(),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)).state_dict(),
}


def _stored(value: Any, folder: Path) -> Any:
    torch.save(value, folder / "stored.pt")
    return torch.load(folder / "stored.pt", weights_only=False)


@pytest.mark.parametrize(
    ("device", "what"),
    [*(("cpu", what) for what in _TAKEN), ("cuda", "state_dict"), ("cuda", "deepcopy")],
    indirect=["device"],
)
def test_states_and_copies_are_those_of_a_model_that_is_whole(
    what: str, device: torch.device, moves: Moves, tmp_path: Path
) -> None:
    model = _built_on(device)
    with _attached(model, tmp_path) as cached:
        _train(model, cached, _loader(_samples()), 2, device)
        taken = _TAKEN[what](model, tmp_path)
        assert moves() == (1, 1)
    expected = {name: one for name, one in model.state_dict().items() if name in taken}
    assert len(taken) >= 9 and [*taken] == [*expected]
    for name, one in taken.items():
        assert one.device == device
        assert torch.equal(one.cpu(), expected[name].cpu())


def test_a_copy_runs_and_can_be_attached(moves: Moves, tmp_path: Path) -> None:
    model, loader, x = _built(), _loader(_samples()), torch.randn(2, 12)
    with _attached(model, tmp_path) as cached:
        _train(model, cached, loader, 2)
        copied, part = copy.deepcopy(model), copy.deepcopy(model.tower)
        expected = model(x)
    assert torch.equal(copied(x), expected)
    assert torch.equal(copied.head(part(x)), expected)
    with _attached(copied, tmp_path, release=False) as cached:
        _train(copied, cached, loader)
        RUNS.clear()
        _train(copied, cached, loader)
        assert (cached.stats.hits, RUNS) == (_NUM, [])


def _edit_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.tower.last.weight.mul_(2)


def _edit_data(model: nn.Module) -> None:
    model.tower.last.weight.data.mul_(2)


def _load(model: nn.Module) -> None:
    torch.manual_seed(9)
    model.tower.load_state_dict(Tower().state_dict())


def _halve(model: nn.Module) -> None:
    model.tower.double()
    model.head.double()
    model.tower.float()
    model.head.float()
    model.tower.last.half().float()


@pytest.mark.parametrize("edit", [_edit_in_place, _edit_data, _load, _halve])
def test_an_edit_while_it_is_away_is_noticed(
    edit: Callable[[Any], None], moves: Moves, tmp_path: Path
) -> None:
    found = []
    for release in (False, True):
        model, loader = _built(), _loader(_samples())
        with _attached(model, tmp_path, release=release) as cached:
            losses = _train(model, cached, loader, 2)
            edit(model)
            RUNS.clear()
            losses += _train(model, cached, loader)
            assert RUNS
            losses += _train(model, cached, loader)
            assert cached.stats.hits == _NUM
        found.append([*losses, *_values(model)])
    assert moves()[0] >= 2
    assert all(map(torch.equal, *found))


def test_an_edit_before_it_comes_back_is_noticed_within_the_epoch(tmp_path: Path) -> None:
    found = []
    for release in (False, True):
        model, loader = _built(), _loader(_samples())
        with _attached(model, tmp_path, release=release) as cached:
            _train(model, cached, loader, 2)
            model.eval()
            for batch in cached.epoch(loader):
                found.append(model(batch["x"]))
                _edit_in_place(model)
                model.state_dict()
    assert all(map(torch.equal, found[:2], found[2:]))
    assert len(found) == 4


def test_a_model_that_is_moved_meanwhile_is_whole(
    device: torch.device, moves: Moves, tmp_path: Path
) -> None:
    model = _built_on(device)
    expected, loader = _values(model.tower), _loader(_samples())
    with _attached(model, tmp_path) as cached:
        _train(model, cached, loader, 2, device)
        for one in _tensors(model):  # As `model.to` does.
            one.data = one.to(device)
        assert all(map(torch.equal, _values(model.tower), expected))
        losses = _train(model, cached, loader, 1, device)
        assert cached.stats.hits == _NUM and all(one.isfinite() for one in losses)
        for one in _tensors(model):
            one.data = one.detach().to("cpu")
        model.state_dict()
    assert {one.device.type for one in _tensors(model)} == {"cpu"}
    assert all(map(torch.equal, _values(model.tower), expected))


def test_it_leaves_at_once_where_rows_were_kept_or_filled(moves: Moves, tmp_path: Path) -> None:
    found = []
    for is_kept in (False, True):
        model, loader = _built(), _loader(_samples())
        with _attached(model, tmp_path, cache_keep=True) as cached:
            if not is_kept:
                cached.fill(loader)
                assert moves() == (1, 0)
            losses = _train(model, cached, loader)
            assert (cached.stats.hits, moves()[1]) == (_NUM, int(is_kept))
        found.append([*losses, *_values(model)])
    assert moves() == (2, 2)
    assert all(map(torch.equal, *found))


def test_it_stays_where_rows_are_missing(
    moves: Moves, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, loader = _built(), _loader(_samples())
    with _attached(model, tmp_path, cache_limit_bytes=3 * 600) as cached:
        _train(model, cached, loader, 2)
        assert 0 < cached.stats.hits < _NUM
    assert moves() == (0, 0)
    assert "parts stay on their device, as" in caplog.text


def test_release_is_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    model = _built()
    for settings in ({"freeze": 1}, {"parts": ["tower"], "cache": False}):
        with pytest.raises(ValueError, match="give parts=, and no cache=False, or leave it out"):
            attach(model, release=True, **settings)
    with pytest.raises(ValueError, match="give parts=, and no cache=False"):
        FreezeCallback(freeze=1, release=True)
    with pytest.raises(ValueError, match="release='disk': give True, False, or leave it out"):
        attach(model, parts=["tower"], release="disk")
    with pytest.raises(ValueError, match="is memory itself: give cache_folder=, a folder on a d"):
        attach(model, parts=["tower"], release=True)
    attach(model, parts=["tower"], release=True, cache_folder=tmp_path).close()
    attach(model, parts=["tower"], release=False).close()


def test_a_callback_releases_parts_too(moves: Moves, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    found = []
    for release in (False, True):
        model = _built()
        arguments = TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=3, per_device_train_batch_size=_BATCH,
            eval_strategy="epoch", save_strategy="steps", save_steps=3, report_to="none",
            disable_tqdm=True, use_cpu=True, logging_strategy="no",
        )  # fmt: skip
        kept = {"cache": True, "cache_folder": tmp_path, "release": release}
        callback = FreezeCallback(parts=["tower"], **kept)
        trainer = Trainer(
            model, arguments, train_dataset=_samples(), eval_dataset=_samples(7),
            callbacks=[callback],
        )  # fmt: skip
        trainer.train()
        assert callback.stats.hits == 2 * _NUM
        found.append(_values(model))
    # It comes back in each evaluation but the first, before which it had not left.
    assert moves() == (2, 2)
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_lightnings_callback_releases_parts_too(moves: Moves, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from pipetransformer import LightningFreezeCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _built()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.head.parameters(), lr=0.1)

    found = []
    for release in (False, True):
        module = Module()
        kept = {"cache": True, "cache_folder": tmp_path, "release": release}
        callback = LightningFreezeCallback(parts=["tower"], **kept)
        trainer = lightning.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        )  # fmt: skip
        trainer.fit(module, _loader(_samples()))
        assert callback.stats.hits >= 2 * _NUM
        found.append(_values(module))
    assert moves() == (1, 1)
    assert all(map(torch.equal, *found))


def _replicated(folder: Path, release: bool) -> tuple[list[Tensor], int, list[bool]]:
    model, samples = _built(), _samples()
    model.tower.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    loader: DataLoader[Any] = DataLoader(samples, 2, sampler=DistributedSampler(samples))
    own = _tensors(model.tower)
    places = [one.data_ptr() for one in own]
    with _attached(model, folder, release=release) as cached:
        losses = _train(wrapped, cached, loader, 3)
        moved = [one.data_ptr() != place for one, place in zip(own, places, strict=True)]
        return [*losses, *_values(model)], cached.stats.hits, moved


@pytest.mark.slow
def test_replicas_release_weights_and_keep_what_is_broadcast(
    two_ranks: Pool, tmp_path: Path
) -> None:
    plain, ours = (two_ranks.run(_replicated, tmp_path, release) for release in (False, True))
    for (expected, _, _), (found, hits, moved) in zip(plain, ours, strict=True):
        assert all(map(torch.equal, found, expected))
        assert hits == _NUM // 2
        assert moved == [False] + [True] * 6 + [False] * 4


def test_a_fingerprint_is_the_same_wherever_tensors_lie() -> None:
    tensors = [torch.randn(3), torch.randn(1 << 15), torch.randn(5), torch.randn(1 << 15)]
    expected = fingerprint(tensors)
    with stand_in_gpu():
        mixed = [one.to(CUDA) if i % 3 else one for i, one in enumerate(tensors)]
        assert fingerprint(mixed) == fingerprint([one.to(CUDA) for one in tensors]) == expected

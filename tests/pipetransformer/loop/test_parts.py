"""A frozen part of a model runs once a sample, and training goes on bit by bit as without rows."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from pipetransformer import FreezeCallback, TopLogits, attach
from tests.helpers.marks import slow
from tests.helpers.part_models import CASES, NUM_SAMPLES, Detector, PartCase, padded
from tests.helpers.pool import Pool

_EPOCHS, _BATCH = 3, 4


def _loader(case: PartCase, **settings: Any) -> DataLoader[Any]:
    torch.manual_seed(1)
    data, collate = case.data(), case.collate
    return DataLoader(data, batch_size=_BATCH, shuffle=True, collate_fn=collate, **settings)


def _train(
    model: nn.Module,
    case: PartCase,
    epoch: Callable[[], Iterable[Any]],
    *,
    before: Callable[[], None] = lambda: None,
) -> list[float]:
    torch.manual_seed(2)
    trained = [
        p
        for name, p in model.named_parameters()
        if p.requires_grad and not name.startswith(case.parts)
    ]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses = []
    for _ in range(_EPOCHS):
        model.train()
        before()
        for batch in epoch():
            optimizer.zero_grad()
            loss = case.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def _count_runs(model: nn.Module, case: PartCase) -> list[int]:
    runs = [0]

    def counted(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        return run(*args, **kwargs)

    for name in case.sees:  # Not by a hook, as parts run where one waits within them.
        module = model.get_submodule(name)
        module.forward = partial(counted, module.forward)
    return runs


def _by_hand(model: nn.Module, case: PartCase, **settings: Any) -> list[float]:
    loader, parts = _loader(case, **settings), [model.get_submodule(one) for one in case.parts]

    def in_eval() -> None:
        for part in parts:
            part.requires_grad_(False).eval()

    return _train(model, case, lambda: loader, before=in_eval)


_ALIKE = {
    "resnet",
    "convnext",
    "clip, images",
    "clip, texts",
    "siglip, both",
    "paligemma",
    "qwen2-vl, patches",
    "bart",
    "bart, padded texts",
    "t5",
    "t5, padded texts",
    "whisper",
    "wav2vec2",
    "llava, padded texts",
    "llava-next, three tiles or five",
}
"""Families whose kind another one shows."""


@pytest.mark.parametrize("name", [slow(name) if name in _ALIKE else name for name in CASES])
def test_a_part_runs_once_a_sample_and_nothing_else_changes(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    plain = copy.deepcopy(model)
    expected = _by_hand(plain, case)
    runs = _count_runs(model, case)
    counted: list[tuple[int, int]] = []
    with attach(model, cache=True, parts=case.parts) as cached:
        loader = _loader(case)

        def epoch() -> Iterable[Any]:
            yield from cached.epoch(loader)
            counted.append((runs[0], cached.stats.hits))
            runs[0] = 0

        # A row of a padded text may be computed at another length, in another order of sums.
        rounds = 0 if case.collate is None else 1e-6
        assert _train(model, case, epoch) == pytest.approx(expected, rel=rounds, abs=0)
    assert counted[-1] == (0, NUM_SAMPLES)
    # LLaVA's first forward hooks its tower's blocks; rows made before went, and it seemed slow.
    assert "were changed" not in caplog.text
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=10 * rounds, atol=10 * rounds)


class Teacher(nn.Module):
    """Statistics of a batch, and dropout, which a teacher in eval mode has not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 32 * 32, 16)
        self.rest = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x.flatten(1))
        return self.rest(hidden), hidden


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_teacher_outside_of_the_model_is_a_part_by_itself(num_workers: int) -> None:
    case = CASES["resnet"]
    torch.manual_seed(0)
    student = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))
    teacher = Teacher()
    teacher.rest[0].running_mean.normal_()
    plain, mentor = copy.deepcopy(student), copy.deepcopy(teacher).eval().requires_grad_(False)

    def losses(model: nn.Module, teaches: nn.Module, epoch: Callable[[], Any]) -> list[float]:
        torch.manual_seed(2)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(_EPOCHS):
            for batch in epoch():
                told, _ = teaches(batch["x"])
                loss = F.kl_div(model(batch["x"]).log_softmax(1), told.softmax(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found

    settings = {"num_workers": num_workers}
    loader = _loader(case, **settings)
    expected = losses(plain, mentor, lambda: loader)
    loader, runs = _loader(case, **settings), []
    run = teacher.first.forward
    teacher.first.forward = lambda x: [run(x), runs.append(len(runs))][0]
    with attach(student, cache=True, parts=[teacher]) as cached:
        assert losses(student, teacher, lambda: cached.epoch(loader)) == expected
        assert cached.stats.hits == NUM_SAMPLES
    # The look at it runs it, too; after the first epoch nothing does.
    assert len(runs) <= 3 * NUM_SAMPLES // _BATCH + 12


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.tower, self.head = nn.Linear(48, 48), nn.Linear(48, 8), nn.Linear(8, 5)
        self.num = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num):
            hidden = self.tower(self.below(x.flatten(1)))
        answer: Tensor = self.head(hidden)
        return answer


def _small() -> DataLoader[Any]:
    x, y = torch.randn(NUM_SAMPLES, 3, 4, 4), torch.arange(NUM_SAMPLES) % 5
    items = [{"x": a, "y": b, "index": i} for i, (a, b) in enumerate(zip(x, y, strict=True))]
    return DataLoader(items, batch_size=4)


def _first_batches(model: nn.Module, parts: Any) -> Any:
    loader = _small()
    with attach(model, cache=True, parts=parts) as cached:
        for _ in range(2):
            for batch in cached.epoch(loader):
                F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        return cached.stats


def test_what_trains_below_a_part_keeps_rows_away(caplog: pytest.LogCaptureFixture) -> None:
    assert _first_batches(Twice(), ["tower"]).hits == 0
    assert "takes part in what they return, and goes on learning" in caplog.text


def test_frozen_weights_below_a_part_are_part_of_its_stamp(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Twice().eval()
    model.below.requires_grad_(False)
    loader = _small()
    with attach(model, cache=True, parts=["tower"]) as cached:
        for epoch in range(3):
            if epoch == 2:
                with torch.no_grad():
                    model.below.weight.mul_(2)
            for batch in cached.epoch(loader):
                expected = model(torch.stack([loader.dataset[i]["x"] for i in _ids_of(batch)]))
                assert torch.equal(model(batch["x"]), expected)
        assert cached.stats.misses > 0
    assert "weights of frozen layers were changed" in caplog.text


def _ids_of(batch: dict[str, Tensor]) -> list[int]:
    return batch["index"].tolist()


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (["towr"], "no module 'towr'; did you mean 'tower'"),
        ("tower", "give a list"),
        ([3], "has a int"),
        (["tower", nn.Linear(2, 2)], "not in the model"),
    ],
)
def test_parts_that_are_none_are_refused(parts: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        attach(Twice(), parts=parts)


def test_a_part_that_runs_twice_is_refused() -> None:
    model = Twice()
    model.num = 2
    with pytest.raises(ValueError, match="calls 'tower' 2 times"):
        _first_batches(model, ["tower"])


class Prompted(Detector):
    """A detector whose backbone sees boxes."""

    def forward(self, x: Tensor, labels: list[dict[str, Tensor]] | None = None) -> Tensor:
        firsts = 0 if labels is None else torch.stack([one["boxes"][0].sum() for one in labels])
        hidden = self.backbone(x + (firsts if labels is None else firsts.view(-1, 1, 1, 1)))
        return self.head(hidden).square().mean()


def test_a_part_that_sees_a_list_of_targets_is_refused() -> None:
    # Rows were made without the list, and trained on in silence.
    case = dataclasses.replace(CASES["one to three boxes"], build=Prompted)
    model = Prompted()
    with (
        attach(model, cache=True, parts=case.parts) as cached,
        pytest.raises(ValueError, match="'backbone' returns something else where the forward"),
    ):
        loader = _loader(case)
        _train(model, case, lambda: cached.epoch(loader))


def test_what_freezes_is_refused_before_the_first_epoch() -> None:
    with pytest.raises(ValueError, match="without freeze= and other parts"):
        attach(Twice(), parts=[nn.Linear(2, 2)], freeze=1)
    with pytest.raises(ValueError, match="a dry run freezes nothing"):
        attach(Twice(), parts=["tower"], dry_run=True)
    with pytest.raises(ValueError, match="parts="):
        attach(Twice(), freeze=nn.Linear(2, 2))  # type: ignore[arg-type]


def _stack(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


@pytest.mark.parametrize("name", ["whisper", pytest.param("llava", marks=pytest.mark.slow)])
def test_a_trainer_of_transformers_has_rows_of_a_part(tmp_path: Path, name: str) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Counts(TrainerCallback):  # type: ignore[misc]
        def on_epoch_end(self, *_: Any, **facts: Any) -> None:
            counted.append(runs[0])

    case, found, counted = CASES[name], [], list[int]()
    torch.manual_seed(0)
    model = case.build()
    torch.manual_seed(1)
    data = case.data()
    for callback in (None, FreezeCallback(cache=True, parts=case.parts)):
        own = copy.deepcopy(model)
        for part in map(own.get_submodule, case.parts):
            part.requires_grad_(False)
            if callback is None:
                part.register_forward_pre_hook(lambda module, _: [module.eval(), None][1])
        runs = _count_runs(own, case)
        arguments = TrainingArguments(
            str(tmp_path), num_train_epochs=_EPOCHS, per_device_train_batch_size=_BATCH,
            report_to=[], logging_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        callbacks = [] if callback is None else [callback, Counts()]
        trainer = Trainer(
            own, arguments, train_dataset=data, data_collator=_stack, callbacks=callbacks
        )
        trainer.train()
        found.append([one["loss"] for one in trainer.state.log_history if "loss" in one])
    assert found[0] == found[1] and len(found[0]) == _EPOCHS * NUM_SAMPLES // _BATCH
    assert callback is not None and callback.stats.hits >= 2 * NUM_SAMPLES
    assert len(counted) == _EPOCHS and counted[-1] == counted[0] > 0


def _noted_epoch(cached: Any, loader: Any, stats: list[Any]) -> Iterable[Any]:
    yield from cached.epoch(loader)
    stats.append(cached.stats)


def test_a_later_run_reads_the_rows_of_a_part(tmp_path: Path) -> None:
    case, stats = CASES["clip, images"], []
    for _ in range(2):
        torch.manual_seed(0)
        model = case.build()
        expected = _by_hand(copy.deepcopy(model), case)
        settings: dict[str, Any] = {"cache_keep": True, "cache_folder": str(tmp_path)}
        with attach(model, cache=True, parts=case.parts, **settings) as cached:
            loader = _loader(case)

            assert _train(model, case, partial(_noted_epoch, cached, loader, stats)) == expected
    assert stats[0].misses and stats[_EPOCHS].hits == NUM_SAMPLES


def test_a_callback_is_given_blocks_or_parts() -> None:
    for given in (
        {},
        {"freeze": 1, "parts": ["a"], "every_steps": 5},
        {"parts": ["a"], "dry_run": True},
    ):
        with pytest.raises(ValueError, match="parts="):
            FreezeCallback(**given)


@pytest.mark.parametrize("is_cast", [slow(False), True])
def test_a_loop_in_autocast_has_rows_in_its_precision(is_cast: bool) -> None:
    case = CASES["resnet"]
    torch.manual_seed(0)
    model = case.build()
    plain = copy.deepcopy(model)

    def cast(one: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.loss(one, batch)

    own = dataclasses.replace(case, loss=cast)
    expected = _by_hand(plain, own)
    with attach(
        model, cache=True, parts=case.parts, **({"precision": "bf16"} if is_cast else {})
    ) as cached:
        loader = _loader(case)
        if is_cast:
            assert _train(model, own, lambda: cached.epoch(loader)) == expected
            assert cached.stats.hits == NUM_SAMPLES
        else:
            with pytest.raises(ValueError, match="give precision='bf16'"):
                _train(model, own, lambda: cached.epoch(loader))


def _replicated(with_rows: bool) -> tuple[list[float], list[Tensor], int]:
    case = CASES["siglip, both"]
    torch.manual_seed(0)
    model = case.build()
    torch.manual_seed(1)
    data = case.data()
    parts = [model.get_submodule(name) for name in case.parts]
    for part in parts:
        part.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses, hits = [], 0
    with contextlib.ExitStack() as stack:
        cached = (
            stack.enter_context(attach(model, cache=True, parts=case.parts)) if with_rows else None
        )
        for number in range(_EPOCHS):
            sampler.set_epoch(number)
            model.train()
            if cached is None:
                for part in parts:
                    part.eval()
            for batch in loader if cached is None else cached.epoch(loader):
                optimizer.zero_grad()
                loss = case.loss(wrapped, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            hits = 0 if cached is None else cached.stats.hits
    return losses, [p.detach().clone() for p in model.parameters()], hits


def test_replicas_have_rows_of_parts(two_ranks: Pool) -> None:
    plain, ours = two_ranks.run(_replicated, False), two_ranks.run(_replicated, True)
    for one, other in zip(plain, ours, strict=True):
        # A product of fewer than four rows has another order of sums on some processors.
        assert other[0] == pytest.approx(one[0], rel=1e-5)
        torch.testing.assert_close(other[1], one[1], rtol=1e-5, atol=1e-6)
        assert other[2] == NUM_SAMPLES // 2


class _Tower(nn.Module):
    """Return tokens, or what `kind` says is wrong with them; blank ones are left out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.linear(tokens)
        if self.kind == "mixes":
            hidden = hidden - hidden.mean(0)
        if self.kind == "turned":
            hidden = hidden.flip(0)
        return hidden


class _Tokens(nn.Module):
    """A head on all of a sample's tokens that are not blank, (N, T, 4)."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.tower, self.head = _Tower(kind), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        real = (x != 0).any(-1)
        summed = torch.zeros(len(x), 6)
        answer: Tensor = self.head(summed.index_add(0, real.nonzero()[:, 0], self.tower(x[real])))
        return answer


def _token_samples(counts: Sequence[int]) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    samples = [torch.randn(5, 4) for _ in counts]
    for sample, num in zip(samples, counts, strict=True):
        sample[num:] = 0
    return [{"x": sample} for sample in samples]


def _trained_on_tokens(
    model: _Tokens, samples: Any, epoch: Callable[[Any], Iterable[Any]], size: int = 2
) -> list[float]:
    torch.manual_seed(0)
    loader = DataLoader(samples, batch_size=size, shuffle=True)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        for batch in epoch(loader):
            loss = model(batch["x"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("counts", [[1, 2, 0, 3] * 3, [1, 1, 2, 0] * 3, [0, 2] * 6, [4] * 12])
def test_a_sample_has_any_number_of_entries(counts: list[int]) -> None:
    samples, model = _token_samples(counts), _Tokens()
    model.tower.requires_grad_(False)
    plain = copy.deepcopy(model)
    expected = _trained_on_tokens(plain, samples, lambda loader: loader)
    with attach(model, parts=["tower"], cache=True) as cached:
        losses = _trained_on_tokens(model, samples, cached.epoch)
        assert cached.stats.hits == len(counts)
    # Sums in another order, over some steps.
    assert losses == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(model.head.weight, plain.head.weight)


def test_a_sample_of_more_entries_than_were_seen_has_no_row() -> None:
    # The looks see samples from all over the data set, but not this one.
    samples, model = _token_samples([1] * 100), _Tokens()
    samples[1]["x"] = torch.randn(5, 4)
    plain = copy.deepcopy(model)
    plain.tower.requires_grad_(False)
    expected = _trained_on_tokens(plain, samples, lambda loader: loader, 4)
    with attach(model, parts=["tower"], cache=True) as cached:
        served = list[int]()

        def epoch(loader: DataLoader[Any]) -> Iterable[Any]:
            yield from cached.epoch(loader)
            assert cached._rows is not None
            served.append(cached._rows.forward.num_served)

        losses = _trained_on_tokens(model, samples, epoch, 4)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert served == [24, 24, 24]  # One batch of 25 runs from its start.


@pytest.mark.parametrize("kind", ["mixes", "turned"])
def test_entries_that_know_other_samples_have_no_rows(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    samples, model = _token_samples([1, 2, 3] * 4), _Tokens(kind)
    plain = copy.deepcopy(model)
    plain.tower.requires_grad_(False)
    expected = _trained_on_tokens(plain, samples, lambda loader: loader)
    with attach(model, parts=["tower"], cache=True) as cached:
        losses = _trained_on_tokens(model, samples, cached.epoch)
        assert cached.stats.hits == 0
    assert "no cache of 'tower'" in caplog.text
    assert losses == expected


class _Language(nn.Module):
    """A causal model of texts, (N, S) to logits (N, S, 50)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.mix = nn.Linear(width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embed(input_ids) * attention_mask[..., None]
        summed = hidden.cumsum(1) / attention_mask.cumsum(1)[..., None].clamp(1)
        answer: Tensor = self.head(torch.tanh(self.mix(summed)))
        return answer


def _texts() -> list[dict[str, Tensor]]:
    torch.manual_seed(3)
    lengths = [4 + index % 5 for index in range(NUM_SAMPLES)]
    return [
        {"input_ids": torch.randint(1, 50, (num,)), "attention_mask": torch.ones(num).long()}
        for num in lengths
    ]


def _distilled(
    student: nn.Module, teacher: nn.Module, epoch: Callable[[Any], Iterable[Any]]
) -> list[float]:
    torch.manual_seed(2)
    loader = DataLoader(_texts(), batch_size=_BATCH, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
    optimizer, losses = torch.optim.SGD(student.parameters(), lr=0.1), []
    for _ in range(_EPOCHS):
        for batch in epoch(loader):
            with torch.no_grad():
                told = teacher(**batch)
            own = student(**batch).log_softmax(-1).gather(-1, told.indices.long())
            each = (told.log_probs.exp() * (told.log_probs - own)).sum(-1)
            mask = batch["attention_mask"]
            loss = (each * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_a_teacher_of_texts_keeps_its_largest_logits() -> None:
    torch.manual_seed(0)
    student, teacher = _Language(8), TopLogits(_Language(16), 5)
    plain, mentor = copy.deepcopy(student), copy.deepcopy(teacher).eval()
    expected = _distilled(plain, mentor, lambda loader: loader)
    runs = list[int]()
    run = teacher.model.mix.forward
    teacher.model.mix.forward = lambda x: [run(x), runs.append(0)][0]
    with attach(student, parts=[teacher]) as cached:
        counts = list[int]()

        def epoch(loader: Any) -> Iterable[Any]:
            yield from cached.epoch(loader)
            counts.append(len(runs))

        assert _distilled(student, teacher, epoch) == pytest.approx(expected, rel=1e-5)
        assert cached.stats.hits == NUM_SAMPLES
        assert cached._rows is not None
        content = cached._rows.feed.keeper.format.content
    assert counts[-1] == counts[-2]
    # Five logits and indices, and a sum, of 4 bytes each, for each token.
    assert content.positions is not None


def test_what_has_no_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="keep at least 1"):
        TopLogits(nn.Linear(2, 2), 0)
    with pytest.raises(ValueError, match="does not return logits of 3 classes"):
        TopLogits(nn.Linear(2, 2), 3)(torch.ones(1, 2))


def _with_rows_of_images(case: PartCase, folder: Path, data: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = case.build()
    kept = {"cache": True, "cache_folder": str(folder), "cache_keep": True}
    hits = list[int]()
    with attach(model, parts=case.parts, **kept) as cached:
        loader = DataLoader(
            data, batch_size=_BATCH, shuffle=True, collate_fn=case.collate, **settings
        )

        def epoch() -> Iterable[Any]:
            yield from cached.epoch(loader)
            hits.append(cached.stats.hits)

        losses = _train(model, case, epoch)
    return losses, hits


class _Edited(Dataset[dict[str, Tensor]]):
    """Give samples of another set, one of which has another pixel."""

    def __init__(self, whole: Any, edited: int) -> None:
        self._whole, self._edited = whole, edited

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = dict(self._whole[index])
        if index == self._edited:
            item["pixel_values"] = item["pixel_values"].clone()
            item["pixel_values"].view(-1)[7] += 1
        return item


@pytest.mark.slow
def test_images_of_any_size_are_read_by_workers_and_kept_by_their_content(tmp_path: Path) -> None:
    case = CASES["qwen2-vl, unequal images"]
    torch.manual_seed(1)
    data = case.data()
    first, hits = _with_rows_of_images(case, tmp_path, data, num_workers=1)
    assert hits == [0, NUM_SAMPLES, NUM_SAMPLES][:_EPOCHS]
    again, hits = _with_rows_of_images(case, tmp_path, data)
    assert (again, hits[0]) == (first, NUM_SAMPLES)
    edited = _Edited(data, 4)
    expected, _ = _with_rows_of_images(case, tmp_path / "apart", edited)
    changed, hits = _with_rows_of_images(case, tmp_path, edited)
    assert changed == expected != first
    assert hits[0] < NUM_SAMPLES


class _Chain(nn.Module):
    """A frozen module below a part, which may be read beside it, or draw."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.noise = kind, nn.Dropout(0.5)
        self.below, self.tower, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "draws beside":
            self.noise(x)
        hidden = self.below(x)
        answer = self.tower(hidden)
        if self.kind == "read beside":
            answer = answer + hidden
        logits: Tensor = self.head(self.noise(answer))
        return logits


@pytest.mark.parametrize(
    ("kind", "runs"),
    [("", 0), ("read beside", 3), ("draws beside", 0), ("hooked", 3), ("hooked within", 3)],
)
def test_what_serves_a_part_alone_runs_no_more(kind: str, runs: int) -> None:
    torch.manual_seed(0)
    model = _Chain(kind)
    model.below.requires_grad_(False)
    plain = copy.deepcopy(model)
    plain.tower.requires_grad_(False)
    samples = [{"x": torch.randn(4)} for _ in range(NUM_SAMPLES)]
    seen = list[Tensor]()

    def train(one: _Chain, epoch: Callable[[Any], Iterable[Any]]) -> tuple[list[float], Tensor]:
        torch.manual_seed(0)
        if kind == "hooked":
            one.below.register_forward_hook(lambda *given: seen.append(given[-1]))
        loader = DataLoader(samples, batch_size=_BATCH, shuffle=True)
        optimizer, losses = torch.optim.SGD(one.head.parameters(), lr=0.1), []
        for _ in range(_EPOCHS):
            for batch in epoch(loader):
                loss = one(batch["x"]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, torch.get_rng_state()

    expected, state = train(plain, lambda loader: loader)
    run, counts = model.below.forward, [0]
    if kind == "hooked within":
        model.below = nn.Sequential(model.below)
        run = model.below[0].forward
        model.below[0].register_forward_hook(lambda *given: seen.append(given[-1]))

    def counted(x: Tensor) -> Tensor:
        counts[-1] += 1
        return run(x)

    getattr(model.below, "0", model.below).forward = counted
    with attach(model, parts=["tower"], cache=True) as cached:

        def epoch(loader: Any) -> Iterable[Any]:
            counts.append(0)
            yield from cached.epoch(loader)

        losses, ours = train(model, epoch)
        assert cached.stats.hits == NUM_SAMPLES
    assert losses == pytest.approx(expected, rel=1e-6)
    assert torch.equal(ours, state)
    assert counts[-1] == runs
    assert not any(bool(one.isnan().any()) for one in seen)


class _Noting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        answer = super().forward(x)
        self.noted = answer.mean()
        return answer


@pytest.mark.parametrize("kind", ["hooked at first", "hooked later", "noted"])
def test_what_is_seen_below_a_part_is_as_without_rows(kind: str) -> None:
    """A hook below a part once saw NaN, as what lies below it does not run; a sum stayed."""
    torch.manual_seed(0)
    samples = [{"x": torch.randn(3, 4)} for _ in range(NUM_SAMPLES)]
    model = nn.Sequential(
        _Noting(4, 4) if kind == "noted" else nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4),
        nn.Linear(4, 4),
    )  # fmt: skip
    model[:3].requires_grad_(False)
    plain = copy.deepcopy(model)

    def train(one: Any, epoch: Callable[[Any], Iterable[Any]]) -> list[list[float]]:
        torch.manual_seed(0)
        seen, found = list[Tensor](), list[list[float]]()
        loader = DataLoader(samples, batch_size=_BATCH, shuffle=True)
        optimizer = torch.optim.SGD(one[3].parameters(), lr=0.1)
        for number in range(_EPOCHS):
            if kind == ("hooked at first" if number == 0 else "hooked later") and number < 2:
                one[1].register_forward_hook(lambda *given: seen.append(given[-1].mean()))
            for batch in epoch(loader):
                told = one(batch["x"])
                beside = one[0].noted if kind == "noted" else (seen or [torch.zeros(())])[-1]
                loss = (told - beside).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append([loss.item(), float(beside)])
        return found

    expected = train(plain, lambda loader: loader)
    with attach(model, parts=["2"], cache=True) as cached:
        assert train(model, cached.epoch) == [pytest.approx(one, rel=1e-5) for one in expected]

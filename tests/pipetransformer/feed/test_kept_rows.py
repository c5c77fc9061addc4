"""A run reads the rows that earlier runs have kept, but none that it would not compute itself."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autocache import RowSets, RowStore
from pipetransformer import attach
from pipetransformer.feed import Samples as Samples_
from tests.helpers.any_models import KINDS, NUM_SAMPLES, build, data, mean_loss, sgd
from tests.helpers.feeds import leave_rows_unchecked
from tests.helpers.marks import slow
from tests.pipetransformer.loop.test_cached_loop import Samples

KIND = KINDS["gpt2_classifier"]
DEPTH = 2
BLOCK = "transformer.h.1.mlp.c_fc.weight"
CHUNK = 4


def texts() -> Samples:
    return Samples({name: tensor.clone() for name, tensor in data(KIND).tensors.items()})


class Run:
    """Train two epochs of a loop over kept rows, or over none."""

    def __init__(
        self,
        folder: Path | None,
        *,
        model: nn.Module | None = None,
        dataset: Any = None,
        collate: Callable[..., Any] | None = None,
        batch_size: int = 4,
        **settings: Any,
    ) -> None:
        self.model = model or build(KIND)
        self.losses: list[float] = []
        self.reads = 0
        self.dataset = texts() if dataset is None else dataset
        loader: DataLoader[Any] = DataLoader(
            self.dataset, batch_size=batch_size, collate_fn=collate
        )
        kept = {"cache_folder": folder, "cache_keep": True} if folder else {}
        optimizer = sgd([*self.model.named_parameters()])
        with attach(
            self.model, freeze=DEPTH, **{"prefix_chunk": CHUNK, **kept, **settings}
        ) as cached:
            self.hits = []
            for _ in range(2):
                before = getattr(self.dataset, "reads", 0)
                for batch in cached.epoch(loader):
                    loss = mean_loss(KIND, self.model, batch)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    self.losses.append(loss.item())
                self.reads = getattr(self.dataset, "reads", 0) - before
                self.hits.append(cached.stats.hits)
        self.weights = dict(self.model.state_dict())


def assert_equal(ours: Run, plain: Run) -> None:
    assert ours.losses == plain.losses
    for name, tensor in plain.weights.items():
        assert torch.equal(ours.weights[name], tensor), name


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the rows of a run."""
    folder = tmp_path_factory.mktemp("kept")
    Run(folder)
    return folder


@pytest.fixture
def rows(kept: Path, tmp_path: Path) -> Path:
    """Return a copy of these rows."""
    return shutil.copytree(kept, tmp_path / "rows")


def test_a_second_run_begins_with_the_rows_of_the_first(tmp_path: Path) -> None:
    first, second, plain = Run(tmp_path), Run(tmp_path), Run(None)
    assert (first.hits, second.hits) == ([0, NUM_SAMPLES], [NUM_SAMPLES, NUM_SAMPLES])
    assert_equal(first, plain)
    assert_equal(second, plain)


def head_only(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("score.weight").mul_(2.0)
        model.get_parameter("transformer.h.2.attn.c_attn.weight").mul_(2.0)


def one_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter(BLOCK).view(-1)[7] += 1e-3


def epsilon(model: nn.Module) -> None:
    model.get_submodule("transformer.h.1.ln_2").eps = 1e-4  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "hits"),
    [
        (head_only, NUM_SAMPLES),
        (one_weight, 0),
        (epsilon, 0),
    ],
)
def test_what_changes_frozen_layers_changes_rows_and_nothing_else_does(
    change: Callable[[nn.Module], None], hits: int, rows: Path
) -> None:
    changed, plainly = build(KIND), build(KIND)
    change(changed)
    change(plainly)
    ours, plain = Run(rows, model=changed), Run(None, model=plainly)
    assert ours.hits == [hits, NUM_SAMPLES]
    assert_equal(ours, plain)


@pytest.mark.parametrize(
    ("settings", "hits"),
    [
        ({"seed": 5}, NUM_SAMPLES),
        ({"prefix_chunk": 2}, 0),
        ({"cache_fingerprint": "words-v1"}, 0),
    ],
)
def test_a_setting_that_changes_rows_finds_none_and_another_finds_all(
    settings: dict[str, Any], hits: int, rows: Path
) -> None:
    found = Run(rows, **settings).hits
    assert found[1] == NUM_SAMPLES and (found[0] > 0) == (hits > 0)


def test_other_threads_compute_other_last_bits_so_they_find_no_row(rows: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert Run(rows).hits[0] == 0
    finally:
        torch.set_num_threads(before)


# Samples 0 and 9 are among those that tell one data set from another.
@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_one_changed_sample_or_label_is_made_anew(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipetransformer.feed.row_origin._MOST_DIGESTED", 2)
    Run(tmp_path)
    changed, plainly = texts(), texts()
    for dataset in (changed, plainly):
        dataset.entries[name][4] = (dataset.entries[name][4] + 1) % 3
    ours, plain = Run(tmp_path, dataset=changed), Run(None, dataset=plainly)
    assert ours.hits == [NUM_SAMPLES - 1, NUM_SAMPLES]
    assert_equal(ours, plain)
    # The row is the new sample's from now on.
    assert Run(tmp_path, dataset=changed).hits == [NUM_SAMPLES, NUM_SAMPLES]


def cut(items: list[dict[str, Tensor]], most: int) -> dict[str, Tensor]:
    """Collate texts, and cut those that are longer."""
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
    ids, mask = batch["input_ids"], batch["attention_mask"]
    mask = mask * (torch.arange(mask.shape[1]) < most)
    return {**batch, "input_ids": ids * mask, "attention_mask": mask}


LIMIT = SimpleNamespace(tokens=8)


def cut_at_limit(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return cut(items, LIMIT.tokens)


def test_another_collate_function_gets_rows_of_its_own(tmp_path: Path) -> None:
    Run(tmp_path, collate=partial(cut, most=8))
    assert Run(tmp_path, collate=partial(cut, most=8)).hits[0] == NUM_SAMPLES
    assert Run(tmp_path, collate=partial(cut, most=9)).hits[0] == 0


def test_a_collate_function_that_cuts_texts_elsewhere_gets_rows_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The samples that tell data sets apart are short: each row's own digest must tell.
    monkeypatch.setattr("pipetransformer.feed.row_origin._MOST_DIGESTED", 2)

    Run(tmp_path, collate=cut_at_limit)
    monkeypatch.setattr(LIMIT, "tokens", 7)  # What an object outside a function holds is not told.
    ours, plain = Run(tmp_path, collate=cut_at_limit), Run(None, collate=cut_at_limit)
    longer = int((texts().entries["attention_mask"].sum(1) > 7).sum())
    assert longer > 0 and ours.hits[0] == NUM_SAMPLES - longer
    assert_equal(ours, plain)


def _layer_norm(*given: Any) -> Tensor:
    # Not F's own, which looks itself up by name where a mode watches torch's functions.
    return torch.layer_norm(*given)


def test_a_changed_function_beneath_a_module_is_found_by_computing_rows_again(
    rows: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(F, "layer_norm", lambda *given: _layer_norm(*given) * 1.001)
    with caplog.at_level(logging.WARNING):
        ours = Run(rows)
    assert "are other than this run computes, though the weights are the same" in caplog.text
    assert ours.hits == [0, NUM_SAMPLES]
    assert_equal(ours, Run(None))


def halve(module: nn.Module, given: Any, answer: Any) -> Any:
    return answer / 2


def halve_by(share: float) -> Callable[..., Any]:
    return lambda module, given, answer: answer * share


@pytest.mark.parametrize("hook", [halve, halve_by(0.25)])
def test_a_hook_on_a_frozen_module_is_part_of_what_rows_are_made_from(
    hook: Callable[..., Any], rows: Path
) -> None:
    def hooked() -> nn.Module:
        model = build(KIND)
        model.get_submodule("transformer.h.0.mlp").register_forward_hook(hook)
        return model

    first, plain = Run(rows, model=hooked()), Run(None, model=hooked())
    assert first.hits == [0, NUM_SAMPLES]
    assert Run(rows, model=hooked()).hits[0] == NUM_SAMPLES
    assert_equal(first, plain)


def test_two_runs_at_once_that_compute_otherwise_read_no_row_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both begin with an empty set, so that there is nothing to compare with at first.
    share = 1.0

    def scaled(*given: Any) -> Tensor:
        return _layer_norm(*given) * share

    def losses(folder: Path | None, loops: list[float]) -> list[list[float]]:
        nonlocal share
        runs = [steps(folder) for _ in loops]
        found: list[list[float]] = [[] for _ in loops]
        for _ in range(6):
            for one, own, factor in zip(runs, found, loops, strict=True):
                share = factor
                own.append(next(one))
        return found

    monkeypatch.setattr(F, "layer_norm", scaled)
    assert losses(tmp_path, [1.0, 1.5]) == losses(None, [1.0, 1.5])


def steps(folder: Path | None) -> Iterator[float]:
    """Take steps in an order of its own: whoever comes first to a sample writes its row."""
    model = build(KIND)
    kept = {"cache_folder": folder, "cache_keep": True} if folder else {}
    loader: DataLoader[Any] = DataLoader(texts(), batch_size=4, shuffle=True)
    with attach(model, freeze=DEPTH, prefix_chunk=CHUNK, **kept) as cached:
        for epoch in range(2):
            torch.manual_seed(epoch)
            for batch in cached.epoch(loader):
                yield mean_loss(KIND, model, batch).item()


def test_of_two_runs_at_once_the_first_writes_and_both_come_to_the_numbers_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [*steps(None)]
    first, second = steps(tmp_path), steps(tmp_path)
    losses = [next(first)], [next(second)]
    written: list[int] = []
    write = RowStore.write

    def noted(store: RowStore, ids: Tensor, *given: Any, **further: Any) -> None:
        written.extend(ids.tolist())
        write(store, ids, *given, **further)

    monkeypatch.setattr(RowStore, "write", noted)
    losses[1].extend(second)
    assert written == []
    losses[0].extend(first)
    assert written and losses == (plain, plain)
    assert Run(tmp_path).hits[0] == NUM_SAMPLES


def test_edited_layers_leave_one_set_behind_however_often_they_are_edited(tmp_path: Path) -> None:
    model = build(KIND)
    loader: DataLoader[Any] = DataLoader(texts(), batch_size=4)
    with attach(
        model, freeze=DEPTH, cache_folder=tmp_path, cache_keep=True, prefix_chunk=CHUNK
    ) as cached:
        for _ in range(3):
            for batch in cached.epoch(loader):
                mean_loss(KIND, model, batch)
                one_weight(model)
    assert len(RowSets(tmp_path).facts()) == 2


def table(texts: Samples, **columns: Any) -> Any:
    entries = {name: tensor.tolist() for name, tensor in texts.entries.items()}
    return datasets.Dataset.from_dict({**entries, **columns}).with_format("torch")


def test_a_table_with_a_transform_is_compared_with_its_rows(tmp_path: Path) -> None:
    def run(added: int) -> Run:
        def cut(batch: dict[str, Any]) -> dict[str, Any]:
            ids = [torch.tensor(one) for one in batch["input_ids"]]
            ids[0][1] += added * int(ids[0][0] == texts().entries["input_ids"][4][0])
            return {**{n: [*map(torch.tensor, c)] for n, c in batch.items()}, "input_ids": ids}

        return Run(tmp_path, dataset=table(texts()).with_transform(cut))

    run(0)
    assert run(0).hits[0] == NUM_SAMPLES
    assert run(1).hits[0] < NUM_SAMPLES


@pytest.mark.parametrize("in_memory", [slow(False), True])
def test_a_table_s_file_with_other_content_of_the_same_length_and_time_is_noticed(
    in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library's fingerprint of a file is its path and its time, or what was saved beside it.
    monkeypatch.setattr("pipetransformer.feed.row_origin._MOST_DIGESTED", 2)
    leave_rows_unchecked(monkeypatch)
    changed = texts()
    changed.entries["input_ids"][4, 1] += 1
    for name, one in {"words": texts(), "others": changed}.items():
        table(one).with_format(None).save_to_disk(tmp_path / name)
    file, other = (next((tmp_path / name).glob("*.arrow")) for name in ("words", "others"))

    def load() -> Any:
        loaded = datasets.load_from_disk(tmp_path / "words", keep_in_memory=in_memory)
        return loaded.with_format("torch")

    before, usual = file.stat(), load()._fingerprint
    Run(tmp_path / "rows", dataset=load())
    assert Run(tmp_path / "rows", dataset=load()).hits[0] == NUM_SAMPLES
    shutil.copyfile(other, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert load()._fingerprint == usual

    ours, plain = Run(tmp_path / "rows", dataset=load()), Run(None, dataset=load())
    assert_equal(ours, plain)
    assert ours.hits == [NUM_SAMPLES - 1, NUM_SAMPLES]


def test_data_under_a_name_of_the_users_are_not_read_to_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_rows_unchecked(monkeypatch)
    items = [{name: tensor[i] for name, tensor in texts().entries.items()} for i in range(10)]
    named = {"dataset": items, "cache_fingerprint": "words-v1"}
    Run(tmp_path, **named)
    reads: list[list[int]] = []
    read = Samples_.read

    def noted(self: Any, ids: Any, *, view: int) -> Any:
        reads.append(list(ids))
        return read(self, ids, view=view)

    monkeypatch.setattr(Samples_, "read", noted)
    loader: DataLoader[Any] = DataLoader(items, batch_size=4)
    kept: dict[str, Any] = {"cache_folder": tmp_path, "cache_keep": True, "prefix_chunk": CHUNK}
    with attach(build(KIND), freeze=DEPTH, cache_fingerprint="words-v1", **kept) as cached:
        next(iter(cached.epoch(loader)))
    looked = len(reads)
    assert Run(tmp_path, **named).hits == [NUM_SAMPLES, NUM_SAMPLES]
    assert len(reads) == 2 * looked  # Both have looked at the data, and read no more.


def test_rows_of_each_depth_serve_a_run_that_freezes_anew(tmp_path: Path) -> None:
    def run() -> list[tuple[int, int, int]]:
        model, found = build(KIND), []
        loader: DataLoader[Any] = DataLoader(texts(), batch_size=4)
        kept = {"cache_folder": tmp_path, "cache_keep": True, "prefix_chunk": CHUNK}
        with attach(model, freeze=[1, 2, 2], **kept) as cached:
            for _ in range(3):
                for batch in cached.epoch(loader):
                    mean_loss(KIND, model, batch)
                stats = cached.stats
                found.append((stats.hits, stats.upgrades, stats.misses))
        return found

    assert run() == [(0, 0, 10), (0, 10, 0), (10, 0, 0)]
    assert run() == [(10, 0, 0)] * 3


PROGRAM = """
    import sys
    from pathlib import Path
    from tests.pipetransformer.feed.test_kept_rows import Run
    run = Run(Path(sys.argv[1]))
    print(run.hits, run.losses)
"""


@pytest.mark.slow
def test_another_process_finds_the_rows_and_comes_to_the_same_numbers(tmp_path: Path) -> None:
    first = Run(tmp_path)
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
    # Rows are named by the number of threads, too, of which these tests have one.
    own = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=own
    )
    assert answer.stdout.strip() == f"{[NUM_SAMPLES, NUM_SAMPLES]} {first.losses}"

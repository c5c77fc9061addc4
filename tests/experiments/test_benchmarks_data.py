"""Test the benchmarks of reading data: what they print and prove, but no speed."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from experiments.benchmarks import data, rivals
from experiments.benchmarks.measuring import both_sides
from experiments.benchmarks.measuring.bars import conclude
from experiments.benchmarks.measuring.jpegs import Jpegs, make_jpegs
from experiments.benchmarks.measuring.loop_process import LoopProcess
from experiments.benchmarks.measuring.rounds import ResultsDifferError
from experiments.benchmarks.measuring.timed_loop import RivalTask, Sentences, sentences_task
from tests.helpers.pool import prepared

TINY = data.DataSetting(
    num_images=8, batch_size=4, num_pixels=64, width=32, depth=2,
    num_settling=1, num_steps=2, num_rounds=2,
)  # fmt: skip
WORDS = ("a", "fine", "film", "not", "so", "dull")


@pytest.mark.slow
def test_data_prints_what_each_side_waits_in_each_state(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = json.loads(json.dumps(data.measure(TINY)))
    assert len(capsys.readouterr().out.splitlines()) == len(found["states"]) == 3
    for state in found["states"].values():
        for name in ("wait_share", "wait_share_plain"):
            low, high = state[f"{name}_range"]
            assert 0 < low <= state[name] <= high < 1
        low, high = state["plain_over_ours_interval"]
        assert 0 < low <= state["plain_over_ours"] <= high
        assert state["step_ms"] > 0 and state["step_ms_plain"] > 0
    assert found["losses_differ_by"] <= 1e-4
    assert found["decode_ms"] > 0 and found["compute_ms"] > 0


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({"plain_over_ours": 1.0, "wait_share_beyond_plain": -0.1}, []),
        ({"plain_over_ours": 0.9, "wait_share_beyond_plain": 0.0}, ["plain_over_ours"]),
        ({"plain_over_ours": 1.0, "wait_share_beyond_plain": 0.1}, ["wait_share_beyond_plain"]),
    ],
)
def test_data_fails_where_ours_waits_or_takes_longer(
    figures: dict[str, float], missed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclude(figures, data.BARS) == bool(missed)
    line = json.loads(capsys.readouterr().out)
    assert line["missed"] == missed and line["most"] == {"wait_share_beyond_plain": 0.02}


def test_samples_in_another_order_are_found_by_their_losses() -> None:
    task = TINY.task(make_jpegs(8), num_workers=0, augment=False)
    assert both_sides.verify_losses(task) <= both_sides.LOSS_TOLERANCE

    class Turned(torch.utils.data.Dataset[Any]):
        """Give the loop the samples from the last to the first."""

        reads = 0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            Turned.reads += 1
            loops = Turned.reads <= 4 * TINY.batch_size
            return task.dataset[7 - index if loops else index]

    with pytest.raises(ResultsDifferError, match="ViT on JPEGs: the first losses are"):
        both_sides.verify_losses(replace(task, dataset=Turned()))


def test_the_plain_loop_s_own_process_ends_at_once_though_a_fork_keeps_its_pipe_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_context, contexts = multiprocessing.get_context("fork"), {"spawn": prepared()}
    monkeypatch.setattr(multiprocessing, "get_context", contexts.__getitem__)
    task = TINY.task(make_jpegs(8), num_workers=0, augment=False)
    before = set(multiprocessing.active_children())
    with LoopProcess(task, learning_rate=1e-3, num_threads=1) as loop:
        assert len(set(multiprocessing.active_children()) - before) == 1
        assert loop.step() > loop.wait_s > 0
        loop.freeze(1)
        assert loop.step() > loop.wait_s > 0
        fork = fork_context.Process(target=time.sleep, args=(60.0,))
        fork.start()
        before_s = time.perf_counter()
    assert time.perf_counter() - before_s < 30
    fork.kill()
    fork.join()
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.slow
def test_a_plain_loop_that_fails_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    broken = Jpegs((b"no picture",) * 8, num_pixels=64, augment=False)
    task = replace(TINY.task(make_jpegs(8), num_workers=0, augment=False), dataset=broken)
    before = set(multiprocessing.active_children())
    with LoopProcess(task, learning_rate=1e-3, num_threads=1) as loop:
        with pytest.raises(RuntimeError, match="the plain loop has failed; see what it printed"):
            loop.step()
    assert "cannot identify image file" in capfd.readouterr().err
    assert set(multiprocessing.active_children()) <= before


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """Write a tiny BERT with a tokenizer, and sentences of unequal lengths."""
    model, sst2 = tmp_path / "model", tmp_path / "SST-2"
    model.mkdir()
    sst2.mkdir()
    vocabulary = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
    (model / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab_file=str(model / "vocab.txt")).save_pretrained(model)
    sizes = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(vocabulary), intermediate_size=16, **sizes)
    BertForSequenceClassification(config).save_pretrained(model)
    rows = [f"{' '.join((WORDS * 2)[n % 5 : 6 + n % 7])}\t{n % 2}" for n in range(24)]
    (sst2 / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows, ""]))
    return str(model), str(sst2)


def in_this_process(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Stand for processes."""
    return function(*arguments)


@pytest.mark.slow
def test_rivals_pad_batch_by_batch_and_read_through_workers_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, folders: tuple[str, str]
) -> None:
    asked = Sentences(*folders, padding="longest", num_workers=2)

    def tasks(sentences: Sentences) -> tuple[RivalTask, ...]:
        assert sentences == asked
        return (replace(sentences_task(sentences), batch_size=4),)

    monkeypatch.setattr(rivals, "tasks", tasks)
    monkeypatch.setattr(rivals, "found_by", in_this_process)
    (task,) = tasks(asked)
    assert task.num_workers == 2 and task.collate_fn is not None
    lengths = {
        task.collate_fn([task.dataset[n] for n in batch])["input_ids"].shape[1]
        for batch in torch.arange(24).split(4)
    }
    assert len(lengths) > 1
    found = json.loads(json.dumps(rivals.compare(asked)))
    assert found["losses_differ_by"]["MiniLM on SST-2"] <= 1e-4
    assert (found["padding"], found["workers"]) == ("longest", 2)
    assert all(found[name] > 0 for name in rivals.BARS.least)


def test_padding_of_random_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="random tokens are all of one length; give the folders"):
        Sentences(padding="longest")
    task = sentences_task(Sentences())
    assert task.collate_fn is None and task.num_workers == 0

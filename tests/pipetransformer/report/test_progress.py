"""Prove that a bar counts what its run does, says what there is, and leaves the terminal clean."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from tqdm import tqdm

from freeze import FreezeSchedule
from pipetransformer import Trainer
from pipetransformer.report.progress import Progress
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.pool import Pool


def make_trainer(**settings: Any) -> Trainer:
    usual: dict[str, Any] = {"epochs": 2, "global_batch_size": 6}
    return Trainer(
        tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss(), **{**usual, **settings}
    )


def assert_ended(capsys: pytest.CaptureFixture[str]) -> str:
    """Check that the cursor is below every bar, and that none is drawn anew; return the text."""
    shown = capsys.readouterr()
    assert shown.err.endswith("\n") and not tqdm._instances
    return shown.out + shown.err


def test_a_bar_of_a_resumed_run_counts_its_own_steps_for_the_rate() -> None:
    progress = Progress(is_shown=True, label="train")
    progress.open(90, 100)
    progress.show(92, 100, dict)
    drawn = progress._bar.format_dict
    progress.close(is_whole=False)
    text = tqdm.format_meter(**{**drawn, "elapsed": 4.0, "rate": None})
    assert "92/100" in text and "2.00s/it" in text


def test_nothing_comes_onto_the_bar_s_line_once_a_run_is_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with make_trainer() as trainer:
        trainer.fit()
        assert "10/10" in assert_ended(capsys)
    with make_trainer() as trainer:
        trainer.begin()
        while not trainer.is_over:
            trainer.step()
        assert "10/10" in assert_ended(capsys)


def test_a_finished_bar_is_not_drawn_by_the_next_run(capsys: pytest.CaptureFixture[str]) -> None:
    first = make_trainer(label="first")
    first.fit()
    assert "first" in assert_ended(capsys)
    with make_trainer(label="second") as second:
        second.fit()
    text = assert_ended(capsys)
    assert "second" in text and "first" not in text
    first.close()
    assert capsys.readouterr().err == ""


def test_a_bar_of_a_run_that_failed_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(context: Any) -> int:
        if context.step:
            raise LookupError("nothing is here")
        return 0

    trainer = make_trainer(freeze=fails)
    with pytest.raises(Exception, match="nothing is here"):
        trainer.fit()
    assert_ended(capsys)
    trainer.close()


def test_one_process_shows_no_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    with make_trainer(freeze=FreezeSchedule([0, 2]), epochs=3) as trainer:
        trainer.fit()
    shown = "".join(capsys.readouterr())
    assert re.search(r"step 5: frozen 0 -> frozen 2, prefix cached in \d+ ms", shown)
    assert not re.search(r"KxR|K x R|M=|M = |gpipe|1f1b", shown)


def shown_by_rank(**settings: Any) -> tuple[str, dict[str, str]]:
    """Train; return what this rank says, and the last fields of its bar."""
    lines: list[str] = []
    fields: dict[str, str] = {}

    def show(self: Any, num_done: int, max_steps: int, own: Callable[[], dict[str, str]]) -> None:
        fields.update(own() if self._is_shown else {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipetransformer.report.progress.tqdm.write", lines.append)
        patch.setattr(Progress, "show", show)
        with make_trainer(pipeline_length=2, **settings) as trainer:
            trainer.fit()
    return "\n".join(lines), fields


def shown_of_two() -> tuple[str, dict[str, str]]:
    return shown_by_rank()


def test_the_main_one_of_two_processes_shows_the_pipeline(two_ranks: Pool) -> None:
    (text, fields), other = two_ranks.run(shown_of_two)
    assert re.search(r"step 0: start -> frozen 0, K x R = 2x1, M = \d+ \(\w+\) in", text)
    assert fields["KxR"] == "2x1" and fields["M"].isdecimal()
    assert other == ("", {})


def shown_of_a_stream() -> tuple[str, dict[str, str]]:
    return shown_by_rank(max_grad_norm=None, weight_versions="stashed")


def test_the_progress_says_which_weights_a_run_without_flushes_uses(two_ranks: Pool) -> None:
    (text, _), _ = two_ranks.run(shown_of_a_stream)
    assert "(1f1b, stashed weights)" in text and "gpipe" not in text

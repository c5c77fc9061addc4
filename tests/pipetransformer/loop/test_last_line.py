"""Training ends with one line: what was saved, and what came of other runs' rows."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pipetransformer import FreezeCallback, attach
from tests.helpers.any_models import build, data
from tests.pipetransformer.loop.test_second_trainings import KIND, trainer_of

NUM, BATCHES = 24, 6
UNFROZEN = r"(no|\d+%) less than unfrozen \(\S+ ± \S+ s\)"
COMPUTED = r"(no|\d+%) less than with all rows computed \(\S+ ± \S+ s\)"


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def last_line(caplog: pytest.LogCaptureFixture) -> str:
    """Return the one line that says what a training took; "" where there is none."""
    lines = [one for one in caplog.messages if "training took" in one]
    assert len(lines) < 2 and lines in ([], caplog.messages[-1:])
    caplog.clear()
    return "".join(lines)


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    return nn.Sequential(nn.Linear(4, 4), blocks, nn.Linear(4, 2))


def loop(num_epochs: int = 3, **settings: Any) -> None:
    own = model()
    samples = torch.utils.data.TensorDataset(torch.randn(NUM, 4))
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    cached = attach(own, optimizer=optimizer, num_epochs=num_epochs, **settings)
    for _ in range(num_epochs):
        for (x,) in cached.epoch(DataLoader(samples, NUM // BATCHES)):
            own(x).sum().backward()
            optimizer.step()
    cached.close()
    cached.close()


@pytest.mark.parametrize(
    ("freeze", "compared", "rows"),
    [
        ([0, 2, 2], f"{UNFROZEN}, and {COMPUTED}", f"{NUM} rows read, {NUM} computed"),
        (2, COMPUTED, f"{2 * NUM} rows read, {NUM} computed"),
        ([0, 0, 1], UNFROZEN, f"0 rows read, {NUM} computed"),
    ],
)
def test_a_loop_ends_with_what_it_has_saved(
    freeze: int | Sequence[int], compared: str, rows: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop(freeze=freeze)
    assert re.fullmatch(
        rf"training took \S+ s, by its own steps {compared}; {rows}", last_line(caplog)
    )


def test_a_loop_that_froze_nothing_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loop(freeze=0)
    assert last_line(caplog) == ""


def test_rows_of_other_runs_are_told_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {"freeze": 2, "cache_folder": tmp_path, "cache_keep": True}
    loop(2, **kept)
    assert f"; {NUM} rows read, {NUM} computed" in last_line(caplog)
    loop(2, **kept)
    assert f"; {2 * NUM} rows read ({NUM} of other runs), 0 computed" in last_line(caplog)


def test_a_policy_s_loop_says_in_the_same_line_what_froze(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop(freeze=lambda context: 2 if context.epoch else 0)
    said = rf"of 2 layers froze: 2 after step 6; training took \S+ s, .*{UNFROZEN}, and {COMPUTED}"
    assert re.match(said, last_line(caplog))


@pytest.mark.parametrize("cache", [None, False])
def test_a_callback_s_training_ends_with_what_it_has_saved(
    cache: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    callback = FreezeCallback(freeze=[0, 1, 1], cache=cache)
    trainer = trainer_of(build(KIND), tmp_path, callback)
    trainer.args.num_train_epochs, trainer._train_batch_size = 3, 2
    trainer.train()
    num, line = len(data(KIND)), last_line(caplog)
    assert re.search(rf"layers froze: 1 after step \d+; training took \S+ s, .*{UNFROZEN}", line)
    rows = f"; {num} rows read, {num} computed"
    assert line.endswith(rows) == bool(re.search(COMPUTED, line)) == (cache is None)

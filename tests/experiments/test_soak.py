"""Prove that the soak finds what is lost, and that it finds nothing in a few kills."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import pytest
import torch

from experiments import soak as soak_module
from experiments.soak import (
    Reference,
    Tally,
    count_late,
    draw,
    judge,
    limit,
    refer,
    same_bits,
    soak,
    wrong_samples,
)
from experiments.soak_programs import EPOCHS, NUM_SAMPLES, STEPS_PER_EPOCH
from experiments.soak_run import PROGRAMS, Calls, Kill, SoakRun

NUM_STEPS = EPOCHS * STEPS_PER_EPOCH


def right_lines() -> list[tuple[int, int, list[int]]]:
    """Return (attempt, step, sample ids) of a run that was never killed."""
    parts = torch.arange(NUM_SAMPLES).tensor_split(STEPS_PER_EPOCH)
    return [(0, step, parts[step % STEPS_PER_EPOCH].tolist()) for step in range(NUM_STEPS)]


def count_wrong(folder: Path, lines: list[tuple[int, int, list[int]]]) -> int:
    """Deal the lines out to two ranks, and count what is wrong with them."""
    for rank in range(2):
        text = [f"{a} {step} {' '.join(map(str, ids))}\n" for a, step, ids in lines[rank::2]]
        (folder / f"samples-{rank}").write_text("".join(text))
    return wrong_samples(folder, 2)


def test_a_run_that_trained_every_sample_once_an_epoch_has_nothing_wrong(tmp_path: Path) -> None:
    assert count_wrong(tmp_path, right_lines()) == 0


def test_steps_repeated_after_a_restart_count_once(tmp_path: Path) -> None:
    lines = right_lines()
    assert count_wrong(tmp_path, [*lines[:7], *[(1, s, ids) for _, s, ids in lines[3:]]]) == 0


@pytest.mark.parametrize("step", [0, NUM_STEPS - 1])
def test_lost_and_repeated_samples_are_counted(tmp_path: Path, step: int) -> None:
    lines = right_lines()
    ids = lines[step][2]
    assert count_wrong(tmp_path, [line for line in lines if line[1] != step]) == len(ids)
    lines[step] = (0, step, ids[1:])
    assert count_wrong(tmp_path, lines) == 1
    lines[step] = (0, step, [*ids, ids[0]])
    assert count_wrong(tmp_path, lines) == 1
    lines[step] = (0, step, [ids[1], *ids[1:]])
    assert count_wrong(tmp_path, lines) == 2


def test_one_bit_or_a_missing_tensor_is_a_difference() -> None:
    state = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}
    other = torch.tensor([1.0, 2.0]).nextafter(torch.tensor([9.0, 2.0]))
    assert same_bits(state, dict(state))
    assert not same_bits(state, {**state, "a": other})
    assert not same_bits(state, {"a": state["a"]})


def test_what_takes_too_long_is_ended() -> None:
    with pytest.raises(TimeoutError, match="not over after 0.05 s"), limit(0.05):
        time.sleep(60)


def test_kills_are_drawn_from_what_the_rank_itself_did() -> None:
    reference = Reference(2, 3.0, ({"a.f": 2}, {"b.g": 1}), {})
    generator = random.Random(0)
    kills = [draw(reference, generator) for _ in range(200)]
    assert {k.rank for k in kills} == {0, 1}
    timed = [k.after_s for k in kills if k.after_s is not None]
    called = {(k.rank, k.function, k.call) for k in kills if k.after_s is None}
    assert 0 <= min(timed) < 0.2 and 1.3 < max(timed) <= 1.5
    assert called == {(0, "a.f", 0), (0, "a.f", 1), (1, "b.g", 0)}


@pytest.mark.parametrize(("event", "num_seen"), [("call", 4), ("return", 5)])
def test_a_kill_strikes_at_its_call_of_its_function(event: str, num_seen: int) -> None:
    source = "def f(i):\n    seen.append(i)\nfor i in range(9):\n    f(i)\n"
    code = compile(source, "/a/autodp/m.py", "exec")
    seen: list[int] = []
    struck: list[int] = []
    calls = Calls(Kill(0, function="m.f", call=4, event=event), lambda _: struck.append(len(seen)))
    calls.follow()
    try:
        exec(code, {"seen": seen})
    finally:
        calls.stop()
    assert struck == [num_seen] and calls.counts["m.f"] == 9


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_few_kills_lose_nothing(program: str) -> None:
    tally = soak(3, seed=1, program=program)
    assert tally.kills == 3 and tally.is_clean, tally
    assert sum(tally.where.values()) == 3


@pytest.mark.slow
def test_a_restart_without_a_kill_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody notes that it was killed, as if a timeout or an error had ended those attempts.
    monkeypatch.setattr(soak_module, "KILLED", "nobody")
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        whole = refer(Path(name) / "whole", 2)
        kills = tuple(Kill(1, after_s=whole.seconds / 8) for _ in range(2))
        judge(SoakRun(f"{name}/run", 2, kills), whole, tally)
    assert (tally.failed, tally.hangs, tally.kills) == (1, 0, 0)


def test_a_run_that_is_never_over_is_a_hang_though_none_of_its_attempts_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(_: object, arguments: tuple[SoakRun], **options: object) -> None:
        folder = Path(arguments[0].folder)
        now_s = time.time()
        (folder / "attempts").write_text("".join(f"{now_s - 59 * n}\n" for n in (2, 1)))
        (folder / "errors").touch()
        raise TimeoutError("not over after 120 s")

    monkeypatch.setattr(soak_module, "launch", launch)
    tally = Tally()
    judge(SoakRun(str(tmp_path / "run"), 2), Reference(2, 1.0, (), {}), tally)
    assert (tally.hangs, tally.failed) == (1, 0)


def test_attempts_that_take_too_long_are_hangs_however_they_end() -> None:
    assert count_late([0.0, 59.9, 119.8]) == 0
    assert count_late([0.0, 60.1, 119.8, 180.0]) == 2


def test_only_zeros_are_clean() -> None:
    assert Tally(kills=5, runs=2).is_clean
    for name in ("hangs", "failed", "lost_or_repeated", "differing", "left_behind"):
        assert not Tally(**{name: 1}).is_clean

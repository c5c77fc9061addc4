"""Prove that the programs of the README and of the pages beside it run as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from pipetransformer import Trainer, cli
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.tiny_hub import tiny_hub

ROOT = Path(__file__).parents[1]


def read(page: str) -> str:
    return (ROOT / page).read_text()


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", read(page), re.DOTALL)


@pytest.mark.parametrize("program", programs("README.md"), ids=["bert", "own loop"])
def test_a_program_of_the_readme_runs_in_at_most_twenty_lines(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with tiny_hub():
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    assert len([line for line in program.splitlines() if line.strip()]) <= 20


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_program_and_the_commands_of_the_page_on_kept_rows_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "docs/kept-rows.md"
    (program,), (answer,) = (
        programs(page),
        re.findall(r"prints:\n\n```\n(.*?)```", read(page), re.DOTALL),
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(program, page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == answer
    (commands,) = re.findall(r"```\n(pipetransformer cache .*?)```", read(page), re.DOTALL)
    for line in commands.splitlines():
        assert cli.main(line.split()[1:]) == 0


@pytest.mark.parametrize("program", programs("docs/pipedream.md"))
def test_a_program_of_the_page_on_pipedream_runs(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "pipedream.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(
    "program", programs("docs/freeze-policies.md"), ids=["own", "in place", "dry run", "lisa"]
)
def test_a_program_of_the_page_on_policies_runs(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "docs/freeze-policies.md"
    exec(compile(program, page, "exec"), {"__name__": "__main__"})
    answers = re.findall(r"It prints:\n\n```\n(.*?)```", read(page), re.DOTALL)
    assert "dry_run" not in program or [capsys.readouterr().out] == answers


def test_the_page_s_own_policy_is_scored_by_the_page_s_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "docs/freeze-policies.md"
    (commands,) = re.findall(r"```\n(pipetransformer score .*?)```", read(page), re.DOTALL)
    score, report = (line.split()[1:] for line in commands.splitlines())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    Path("my_module.py").write_text(programs(page)[0])
    with Trainer(
        tiny_model(),
        tiny_data(),
        eval_dataset=tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        signals=["accumulated_gradient", "relative_update"],
        folder=score[1],
        epochs=6,
        progress=False,
    ) as trainer:
        trainer.fit()
    capsys.readouterr()
    assert cli.main(score) == 0
    named = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert set(score[3:7]) < set(named) and named["my_module:NoBetter"][1] == "@"
    assert cli.main(report) == 0


@pytest.mark.parametrize(
    "program", programs("docs/gpipe.md"), ids=["gpipe", "step", "skips", "trace"]
)
def test_a_program_of_the_page_on_gpipe_runs(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "gpipe.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("page", "num_lines"), [("docs/models.md", 2), ("docs/own-loop.md", 3)])
def test_a_page_is_a_program_that_prints_what_it_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    page: str,
    num_lines: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(programs(page)), page, "exec"), {"__name__": "__main__"})
    blocks = re.findall(
        r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    promised = [line for kind, block in blocks if not kind for line in block.splitlines()]
    assert len(promised) == num_lines
    assert set(promised) <= set(capsys.readouterr().out.splitlines())


@pytest.mark.slow
def test_the_program_of_the_page_on_clusters_starts_its_own_processes(tmp_path: Path) -> None:
    (program,) = programs("docs/cluster.md")
    script = tmp_path / "train.py"
    script.write_text(program)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["vit: rank 0 of 2", "vit: rank 1 of 2"]

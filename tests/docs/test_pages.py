"""Prove that the pages' programs, commands and links work, and that their sentences are short."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.docs_pages import pages as generated_pages
from pipetransformer import cli
from tests.helpers.marks import slow
from tests.helpers.tiny_hub import tiny_hub

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
BESIDE = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "experiments/README.md",
    "examples/README.md",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, *kinds: str) -> list[str]:
    """Return a page's fenced blocks of some kinds; a block without a word is of kind ""."""
    return [block for kind, block in FENCE.findall(read(page)) if kind in kinds]


def printed(page: str) -> list[str]:
    """Return the lines that a page promises: they follow "It prints:"."""
    answers = re.findall(r"It prints:\n\n```\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)
    return "".join(answers).splitlines()


@pytest.mark.parametrize(
    "name",
    [
        "bert-on-glue",
        slow("vit-on-images"),
        slow("lora-on-a-decoder"),
        slow("your-own-policy"),
    ],
)
def test_a_tutorial_is_a_program_that_prints_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = f"docs/tutorials/{name}.md"
    monkeypatch.chdir(tmp_path)
    with tiny_hub(num_samples=40):
        exec(compile("\n".join(blocks(page, "python")), page, "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line in printed(page)] == printed(page)
    if name == "vit-on-images":  # Its other figures are an example.
        assert "3 of 6 blocks are frozen" in said
    assert printed(page) or name in ("bert-on-glue", "vit-on-images")
    for command in commands(page):
        if command[0] == "report":
            assert cli.main(command) == 0


@pytest.mark.parametrize("name", ["frozen-parts", "language-models", "tasks", "tracking"])
def test_a_page_s_programs_print_what_it_says(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = f"docs/{name}.md"
    for program in blocks(page, "python"):
        exec(compile(program, page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == printed(page)


@pytest.mark.slow
def test_the_tutorial_of_several_processes_stops_and_goes_on(tmp_path: Path) -> None:
    page = "docs/tutorials/first-cluster.md"
    (program,) = blocks(page, "python")
    (tmp_path / "first.py").write_text(program)
    run = subprocess.run(
        [sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == printed(page)


def test_the_module_of_the_page_on_planning_gets_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = blocks("docs/planning.md", "python")
    (tmp_path / "mine.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    cluster = str(ROOT / "docs/clusters/2x8-rtx5000.toml")
    assert cli.main(["plan", "mine:build", "--cluster", cluster, "--batch", "32"]) == 0
    assert "choice: K = " in capsys.readouterr().out


def test_a_test_runs_every_page_that_has_a_program() -> None:
    files = (ROOT / "tests/test_readme.py", *Path(__file__).parent.glob("test_*.py"))
    tests = "".join(path.read_text() for path in files)
    with_programs = {page for page in PAGES if blocks(page, "python")}
    assert [page for page in sorted(with_programs) if Path(page).stem not in tests] == []


def commands(page: str) -> list[list[str]]:
    """Return the words of a page's commands `pipetransformer ...`, without the first."""
    text = "".join(blocks(page, "", "sh")).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("pipetransformer ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


class ParsedError(Exception):
    """Stop a command once its words were understood."""


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_a_page_s_commands_are_understood(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *arguments: Any) -> Any:
        parse(self, *arguments)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    for command in commands(page):
        with pytest.raises(ParsedError, match="^$"):
            cli.main(command)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


@functools.cache
def generated() -> frozenset[Path]:
    """Return the pages that are made from the packages."""
    return frozenset(ROOT / "docs" / place for place in generated_pages())


@pytest.mark.parametrize("page", [*PAGES, *BESIDE])
def test_a_page_s_links_lead_somewhere_in_the_repository(page: str) -> None:
    lost = []
    for target, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]*))?\)", read(page)):
        path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        if path not in generated() and (
            not path.exists() or (anchor and anchor not in anchors(path))
        ):
            lost.append(f"{target}#{anchor}")
    assert lost == []


def sentences(text: str) -> Iterator[str]:
    """Yield a page's sentences; a row of a table has one in each cell, or several."""
    prose = FENCE.sub("\n\n", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |\|)", prose):
        for cell in block.split("|") if block.startswith("|") else [block]:
            words = " ".join(re.sub(r"\]\([^)]*\)", "]", cell).split())
            yield from re.split(r"(?<=[.?!:]) ", words)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_sentences_of_at_most_twenty_words_and_short_lines(page: str) -> None:
    # A generated table is not ours to word.
    text = re.sub(r"<!-- census -->.*?<!-- /census -->", "", read(page), flags=re.DOTALL)
    assert [one for one in sentences(text) if len(one.split()) > 20] == []
    # The site's column has room for 88.
    programs = "".join(blocks(page, "python", "diff"))
    assert [line for line in programs.splitlines() if len(line) > 88] == []
    # What a program prints is as wide as it is.
    text = re.sub(r"^```text\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 120] == []

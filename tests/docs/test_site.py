"""Prove what the site is made of: its links, its reference pages, and that it needs no network."""

from __future__ import annotations

import importlib
import inspect

import pytest

from experiments.docs_docstrings import separated
from experiments.docs_hooks import beside, linked_files, loaded_from_afar, relinked
from experiments.docs_pages import (
    INTERFACES,
    commands,
    commands_page,
    home_of,
    interface_page,
    is_constant,
    public_names,
    settings,
    settings_page,
)
from pipetransformer import TrainConfig


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("docs/limits.md", "models.md#lora-and-kin", "models.md#lora-and-kin"),
        ("docs/results.md", "../experiments/LOG.md", "experiments/LOG.md"),
        ("docs/tutorials/index.md", "../own-loop.md", "../own-loop.md"),
        ("docs/tutorials/index.md", "../../experiments/LOG.md", "../experiments/LOG.md"),
        ("experiments/README.md", "../docs/limits.md", "../limits.md"),
        ("experiments/results/sst2/README.md", "learning.png", "learning.png"),
        ("CONTRIBUTING.md", "docs/limits.md#limits-today", "limits.md#limits-today"),
        ("docs/limits.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/limits.md", "no-such-page.md", "no-such-page.md"),
    ],
)
def test_a_link_leads_in_the_site_where_it_leads_in_the_repository(
    page: str, link: str, expected: str
) -> None:
    assert relinked(f"see [it]({link}).", page) == f"see [it]({expected})."


def test_a_file_that_a_page_links_to_is_in_the_site() -> None:
    assert set(linked_files("docs/cluster.md")) == {
        "experiments/cluster/train_vit.py",
        "experiments/cluster/slurm.sh",
        "experiments/cluster/ssh.sh",
    }
    assert "experiments/results/sst2/README.md" in beside()


@pytest.mark.parametrize(
    ("html", "is_loaded"),
    [
        ('<script src="https://cdn.example.org/a.js"></script>', True),
        ('<img alt="" src="//example.org/a.png">', True),
        ('<link rel="stylesheet" href="https://example.org/a.css">', True),
        ('<link rel="preconnect" href="https://example.org">', True),
        ('<script src="assets/a.js"></script><link rel="icon" href="assets/a.png">', False),
        ('<a href="https://example.org">a link that a reader follows</a>', False),
    ],
)
def test_what_a_page_would_load_from_a_network_is_found(html: str, is_loaded: bool) -> None:
    assert bool(loaded_from_afar(html)) is is_loaded


def test_sections_of_a_docstring_are_separated_and_nothing_else_is() -> None:
    text = "Do it.\n\nArgs:\n    x: a number.\nReturns:\n    another.\nSource: a paper."
    parts = ["Do it.", "Args:\n    x: a number.", "Returns:\n    another.", "Source: a paper."]
    assert separated(text) == "\n\n".join(parts)
    other = "Say what it returns:\n    a number."
    assert separated(other) == other


def test_the_page_of_settings_has_every_field_with_its_default_and_its_sentences() -> None:
    told = {one.name: one for one in settings()}
    fields = TrainConfig.__dataclass_fields__
    assert list(told) == list(fields)
    assert all(one.section and one.allowed and one.meaning for one in told.values())
    plain = {name: field.default for name, field in fields.items() if not callable(field.default)}
    assert {name: told[name].default for name in plain} == {
        name: repr(default) for name, default in plain.items()
    }
    rows = [line for line in settings_page().splitlines() if line.startswith("| <span")]
    assert len(rows) == len(fields)


def test_the_page_of_commands_has_the_help_of_each() -> None:
    found = {" ".join(words) for words in commands()}
    assert found >= {"plan", "verify", "report", "score", "export", "cache ls", "cache rm"}
    page = commands_page()
    assert all(f"usage: pipetransformer {name}" in page for name in found)


@pytest.mark.parametrize("package", INTERFACES)
def test_every_public_name_is_on_a_page_of_the_reference(package: str) -> None:
    for name in public_names(package):
        home = home_of(package, name)
        part = getattr(importlib.import_module(home), name)
        shown = f"| `{name}` |" if is_constant(part) else f"::: {home}.{name}\n"
        assert shown in interface_page(home)


@pytest.mark.parametrize("package", INTERFACES)
def test_every_public_name_is_documented(package: str) -> None:
    parts = {
        name: getattr(importlib.import_module(package), name) for name in public_names(package)
    }
    missing = {
        f"{package}.{name}"
        for name, part in parts.items()
        # A dataclass without words of its own gets its signature.
        if not is_constant(part) and (part.__doc__ or f"{name}(").startswith(f"{name}(")
    }
    assert not missing
    assert all(inspect.getdoc(importlib.import_module(package)) for package in INTERFACES)

"""Write the reference pages of the documentation from the code itself."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from pipetransformer import TrainConfig, cli

INTERFACES = {
    "pipetransformer": "Train, plan and freeze: all that most programs import.",
    "pipetransformer.hf": "The interface of transformers' Trainer.",
    "freeze": "Freeze policies and what they see, and freezing in place.",
    "autopipe": "Pipelines in one process.",
    "autodp": "Topology, groups and messages. For those who work on PipeTransformer.",
    "autocache": "Rows and their stores. For those who work on PipeTransformer.",
}
"""Modules whose names are public, each with what it is for."""


@dataclass(frozen=True)
class Setting:
    """Hold what the configuration says of one setting."""

    section: str
    name: str
    default: str
    allowed: str
    meaning: str


def settings() -> list[Setting]:
    """Return the settings of a run in the order of the source.

    Raises:
        ValueError: a field has no sentence below it.
    """
    told = dict(re.findall(r"^(\w+) = (.*(?:\n    .*|\n$)*)", TrainConfig.__doc__ or "", re.M))
    found, section = [], ""
    for line in inspect.getsource(TrainConfig).partition("def __post_init__")[0].splitlines():
        if title := re.fullmatch(r"    # ([A-Z][^.]*)", line):
            section = title[1]
        elif field := re.match(r"    (\w+): (.+) = ", line):
            name, kind = field.groups()
            if name not in told:
                raise ValueError(f"TrainConfig.{name} has no sentence; write it below the field")
            default, *below = told[name].splitlines()
            # What is only a type has no rule, so that all lines below are sentences.
            has_rule = kind.startswith(("Annotated", "Literal", "bool"))
            allowed = below.pop(0).strip() if has_rule else f"a `{kind}`"
            meaning = " ".join(part.strip() for part in below)
            found.append(Setting(section, name, default, allowed, meaning))
    return found


def settings_page() -> str:
    """Return the page of all settings, a table for each section."""
    lines = [
        "# Settings\n",
        "These are the keyword arguments of `Trainer`, and the fields of `TrainConfig`.",
        "This page is made from the code.",
    ]
    section = ""
    for one in settings():
        if one.section != section:
            section = one.section
            lines += [f"\n## {section}\n", "| setting | default | allowed | meaning |"]
            lines.append("|---|---|---|---|")
        # Other pages link to a setting by its name.
        named = f'<span id="{one.name}">`{one.name}`</span>'
        cells = (named, f"`{one.default}`", one.allowed, one.meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def help_of(*words: str) -> str:
    """Return what a command prints for --help."""
    said = io.StringIO()
    terminal = mock.patch.dict("os.environ", {"COLUMNS": "100", "NO_COLOR": "1"})
    with terminal, contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return said.getvalue()


def commands(*words: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of all commands below the given ones, and of those below these."""
    if inner := re.search(r"^  \{([\w,-]+)\}", help_of(*words), re.MULTILINE):
        for one in inner[1].split(","):
            yield (*words, one)
            yield from commands(*words, one)


def commands_page() -> str:
    """Return the page of all commands, each with its own help."""
    parts = ["# Commands\n\nEach command prints its part of this page with `--help`.\n"]
    for words in commands():
        parts.append(f"## pipetransformer {' '.join(words)}\n\n```text\n{help_of(*words)}```\n")
    return "\n".join(parts)


def public_names(package: str) -> list[str]:
    """Return the names that a module offers, in order."""
    return sorted(importlib.import_module(package).__all__, key=lambda name: (name.lower(), name))


def home_of(package: str, name: str) -> str:
    """Return the module whose page describes a name: its own package's, if that shows it too."""
    for other in ("freeze", "autopipe"):
        if package == "pipetransformer" and name in public_names(other):
            return other
    return package


def interface_page(package: str) -> str:
    """Return the page of a module's public names; mkdocstrings fills in what is after `:::`."""
    lines = [f"# {package}\n\n{INTERFACES[package]}\n"]
    names = public_names(package)
    if moved := [name for name in names if home_of(package, name) != package]:
        lines += ["Also imported from here, and described where they come from:\n"]
        homes = {name: home_of(package, name) for name in moved}
        links = [f"[`{name}`]({home}.md#{home}.{name})" for name, home in homes.items()]
        lines += [", ".join(links) + "\n"]
    here = {name: getattr(importlib.import_module(package), name) for name in names}
    here = {name: part for name, part in here.items() if name not in moved}
    plain = {name: part for name, part in here.items() if is_constant(part)}
    for name, part in here.items():
        if name not in plain:
            lines.append(f"::: {package}.{name}\n{_options(part)}")
    if plain:
        lines += ["## Constants\n\n| name | value |\n|---|---|"]
        lines += [f"| `{name}` | `{shown(part)}` |" for name, part in plain.items()]
    return "\n".join(lines)


def is_constant(part: Any) -> bool:
    """Return whether a public name stands for a value or a type's alias."""
    return not (inspect.ismodule(part) or inspect.isclass(part) or inspect.isfunction(part))


def shown(value: Any) -> str:
    """Return a constant as a cell of a table shows it, sets in order."""
    text = f"{{{', '.join(map(repr, sorted(value)))}}}" if isinstance(value, frozenset) else value
    return str(text).replace("|", chr(92) + "|")


def _options(part: Any) -> str:
    """Return what mkdocstrings is told of one part, below its `:::`."""
    if inspect.ismodule(part):  # It shows what it offers, and not what it imports.
        return f"    options: {{members: {list(part.__all__)}}}\n"
    if part is TrainConfig:
        return (
            "    options: {members: false}\n\n"
            "All fields are on [the page of settings](settings.md).\n"
        )
    return ""


def index_page() -> str:
    """Return the page from which all reference pages are found."""
    rows = [f"| [`{package}`]({package}.md) | {what} |" for package, what in INTERFACES.items()]
    return "\n".join(
        [
            "# Reference\n",
            "These pages are made from the code.\n",
            "| page | what is there |",
            "|---|---|",
            "| [Settings](settings.md) | every keyword argument of `Trainer` |",
            "| [Commands](commands.md) | `pipetransformer` on the command line |",
            *rows,
        ]
    )


def pages() -> dict[str, str]:
    """Return all reference pages by their place in the site."""
    return {
        "reference/index.md": index_page(),
        "reference/settings.md": settings_page(),
        "reference/commands.md": commands_page(),
        **{f"reference/{package}.md": interface_page(package) for package in INTERFACES},
    }

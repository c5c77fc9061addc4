"""Write what the census has found between two marks of a page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.census.part_subjects import PART_TASKS
from experiments.census.pool import Tried
from experiments.census.subjects import TASKS

_BEGIN, _END = "<!-- census -->", "<!-- /census -->"

_WORDS = {
    "causal": "causal language models",
    "masked": "masked language models",
    "sequence": "classes of texts",
    "token": "classes of tokens",
    "question": "answers to questions",
    "image": "classes of images",
    "timm": "timm",
    "image-text": "images to text",
    "speech": "speech to text",
    "seq2seq": "text to text",
    "ctc": "CTC",
    "audio": "classes of sounds",
    "detection": "objects",
    "zero-shot": "objects, zero-shot",
    "instance": "instances",
    "semantic": "semantic segments",
    "universal": "segments of all kinds",
    "depth": "depth",
    "backbone": "a head on timm's or torchvision's",
}

_KINDS = ("trains", "refused", "wrong", "crash", "not built")

_PART_KINDS = ("served", "not cached", "refused", "wrong", "crash", "not built")

_LONGEST = 160
"""Characters of a reason in a table."""


def write_page(path: Path, text_of_tables: str) -> None:
    """Replace what stands between the marks of a page.

    Raises:
        ValueError: the page has no marks.
    """
    text = path.read_text()
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise ValueError(f"{path} lacks the lines {_BEGIN} and {_END}; the table goes between")
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    path.write_text(f"{before}{_BEGIN}\n{text_of_tables}\n{_END}{after}")


def tables(found: Sequence[Tried]) -> str:
    """Return the tables: how many, which families train, and why others do not."""
    found = sorted(found, key=lambda one: (one.subject.family, one.subject.name))
    parts = [_counts(found, (*TASKS, "timm"), _KINDS), _training(found)]
    for kind in _KINDS[1:]:
        chosen = [one for one in found if one.outcome.kind == kind]
        if chosen:
            parts.append(_reasons(kind.capitalize(), chosen))
    return "\n\n".join(parts)


def part_tables(found: Sequence[Tried]) -> str:
    """Return the tables of frozen parts: how many, and why others have no rows."""
    found = sorted(found, key=lambda one: (one.subject.family, one.subject.name))
    parts = [_counts(found, (*PART_TASKS, "backbone"), _PART_KINDS)]
    for kind in _PART_KINDS[1:]:
        chosen = [one for one in found if one.outcome.kind == kind]
        if chosen:
            parts.append(_reasons(kind.capitalize(), chosen))
    return "\n\n".join(parts)


def _counts(found: Sequence[Tried], tasks: Iterable[str], all_kinds: Sequence[str]) -> str:
    rows = []
    for task in tasks:
        kinds = Counter(one.outcome.kind for one in found if one.subject.task == task)
        built = kinds.total() - kinds["not built"]
        share = f"{kinds[all_kinds[0]] / built:.0%}" if built else ""
        numbers = (str(kinds[kind]) for kind in all_kinds)
        rows.append((_WORDS[task], *numbers, share))
    return _table(("", *all_kinds, "of those built"), rows)


def _training(found: Sequence[Tried]) -> str:
    """Return the families that train, joined where they do for the same tasks."""
    tasks_of: dict[str, set[str]] = {}
    for one in found:
        if one.outcome.kind == "trains":
            tasks_of.setdefault(one.subject.family, set()).add(one.subject.task)
    families_of: dict[tuple[str, ...], list[str]] = {}
    for family, tasks in tasks_of.items():
        families_of.setdefault(tuple(task for task in _WORDS if task in tasks), []).append(family)
    rows = [
        (", ".join(_WORDS[task] for task in tasks), ", ".join(families))
        for tasks, families in sorted(families_of.items(), key=lambda pair: -len(pair[1]))
    ]
    return _table(("trains for", "families"), rows)


def _reasons(title: str, chosen: Iterable[Tried]) -> str:
    tasks_of: dict[tuple[str, str], list[str]] = {}
    for one in chosen:
        key = one.subject.family, _shortened(one.outcome.reason)
        tasks_of.setdefault(key, []).append(_WORDS[one.subject.task])
    rows = [
        (family, ", ".join(dict.fromkeys(tasks)), reason)
        for (family, reason), tasks in tasks_of.items()
    ]
    return _table((title.lower(), "for", "why"), rows)


def _shortened(reason: str) -> str:
    """Return a reason without what all of them say, in one cell of a table."""
    reason = re.sub(r"^\w+Error: ", "", reason)
    reason = reason.partition("could be cut and frozen: ")[2] or reason
    reason = re.split(r"\. docs/models|; give the LayeredModel|\. Check out|; let it", reason)[0]
    if len(reason) > _LONGEST:
        reason = reason[:_LONGEST].rpartition(" ")[0] + " ..."
    return reason.replace("|", "\\|").replace("<", "\\<")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

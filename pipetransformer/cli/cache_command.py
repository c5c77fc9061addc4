"""Look at rows that runs have kept, check them, and remove them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from autocache import RowSets, SetFacts

_SHORT = 17
"""Letters of a set's name that tell it from others."""

_DAY_S = 86400.0


def add_cache_parser(parser: argparse.ArgumentParser) -> None:
    """Add the commands `ls` and `rm`."""
    commands = parser.add_subparsers(required=True)
    listing = commands.add_parser("ls", help="say what is kept, the last used first")
    removing = commands.add_parser("rm", help="remove sets of rows that no process uses")
    for command in (listing, removing):
        command.add_argument("folder", type=Path, help="the cache_folder= of the runs")
    which = removing.add_mutually_exclusive_group(required=True)
    add = which.add_argument
    add("names", nargs="*", default=[], help="sets, by the beginning of their names")
    add("--all", action="store_true", help="all of them")
    listing.set_defaults(run=_list)
    removing.set_defaults(run=_remove)


def _sets_in(folder: Path) -> RowSets:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the cache_folder= of a run that kept rows")
    return RowSets(folder)


def _list(options: argparse.Namespace, say: Callable[[str], object]) -> None:
    facts = _sets_in(options.folder).facts()
    for rows in facts:
        known = [name for name in ("layers", "samples") if name in rows.about]
        about = [rows.about.get("model", ""), *(f"{rows.about[name]} {name}" for name in known)]
        used = "in use" if rows.is_used else f"used {_ago(time.time() - rows.last_used)} ago"
        say(
            f"{rows.name[:_SHORT]}  {rows.num_bytes / 1e6:10.1f} MB  "
            f"{rows.num_whole} of {rows.num_rows} rows  {used}  {', '.join(about)}"
        )
    say(f"{len(facts)} sets, {sum(rows.num_bytes for rows in facts) / 1e6:.1f} MB")


def _remove(options: argparse.Namespace, say: Callable[[str], object]) -> bool:
    sets = _sets_in(options.folder)
    before = sets.facts()
    for rows in before if options.all else _named(before, options.names):
        if not sets.remove(rows.name):
            say(f"{rows.name[:_SHORT]} is in use, and stays")
    left = {rows.name for rows in sets.facts()}
    gone = [rows for rows in before if rows.name not in left]
    say(f"removed {len(gone)} sets, {sum(rows.num_bytes for rows in gone) / 1e6:.1f} MB")
    return True


def _named(facts: list[SetFacts], names: list[str]) -> list[SetFacts]:
    for name in names:
        matching = [rows for rows in facts if rows.name.startswith(name)]
        if len(matching) != 1:
            raise ValueError(f"{len(matching)} sets have names that begin with {name!r}; see `ls`")
    return [rows for rows in facts if rows.name.startswith(tuple(names))]


def _ago(seconds: float) -> str:
    for unit, length in (("days", _DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"

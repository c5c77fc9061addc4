"""Show a report as a table: a line for each that was found, with its share of the ideal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ERROR_WIDTH = 300
_HEADER = f"{'phase':13}  {'line':44}  {'state':8}  {'of ideal':>8}  figures"


def table(report: Mapping[str, Any]) -> str:
    """Return the report in lines of text."""
    rows = [row for name, phase in report["phases"].items() for row in _rows(name, phase)]
    return "\n".join([_HEADER, *rows, f"{report['seconds']:.0f} s in all", ""])


def _rows(name: str, phase: Mapping[str, Any]) -> Iterator[str]:
    taken = f"{phase['seconds']:.0f} of {phase['limit_s']:.0f} s" if "seconds" in phase else ""
    yield f"{name:13}  {'':44}  {phase['status']:8}  {'':8}  {taken}".rstrip()
    for line in phase.get("lines", ()):
        share = f"{line['of_ideal']:.2f}" if line["of_ideal"] is not None else "-"
        figures = "  ".join(f"{key} {_shown(value)}" for key, value in line["figures"].items())
        said = line["error"][:_ERROR_WIDTH].replace("\n", " ") or figures
        yield f"{'':13}  {line['name']:44}  {line['status']:8}  {share:>8}  {said}".rstrip()


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(value)

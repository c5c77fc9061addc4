"""Compare micro-batch counts M by their throughput, for each pipeline length K."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

Table: TypeAlias = Mapping[int, float]
"""Samples a second by M."""

Tables: TypeAlias = Mapping[int, Table]
"""Tables by K."""


def best_first(table: Table) -> list[int]:
    """Return every M, those of the highest throughput first, of equal ones the smallest first."""
    # Nine digits, so that sums which round differently count as equal.
    return sorted(table, key=lambda count: (-float(f"{table[count]:.9g}"), count))


def best_count(table: Table) -> int:
    """Return the M of the highest throughput, of equal ones the smallest."""
    return best_first(table)[0]


def table_text(tables: Tables) -> str:
    """Return throughput tables as text, one row for each K; the best M has a star."""
    rows = []
    for length, table in tables.items():
        best = best_count(table)
        cells = [f"{f'{rate:.4g}' + '*' * (m == best):>8}" for m, rate in table.items()]
        rows.append(f"K = {length:<3} M = {', '.join(map(str, table)):<28}{''.join(cells)}")
    return "\n".join(["samples/s by pipeline length K and micro-batches M, simulated", *rows])


def draw_tables(tables: Tables, path: str | Path) -> None:
    """Draw throughput over M / K, a line for each K; the path's ending tells the format."""
    # Loaded only for a picture: training needs no matplotlib. A figure of its own, without
    # pyplot, leaves the caller's backend and open figures alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for length, table in tables.items():
        ratios = [count / length for count in table]
        best = best_count(table)
        (line,) = axes.plot(ratios, list(table.values()), marker="o", label=f"K = {length}")
        axes.plot([best / length], [table[best]], marker="*", ms=14, color=line.get_color())
    axes.set(xlabel="micro-batches M / K", ylabel="samples/s", ylim=(0, None))
    axes.set_title("Throughput by M; the star is what is taken", loc="left", fontsize=10)
    axes.legend(frameon=False)
    figure.savefig(path)

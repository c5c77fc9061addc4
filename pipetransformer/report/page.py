"""Write a run as one page of HTML, report.html, that needs no network and no other file.

    records ─► sections ─► page     plotly's script once, the figures as JSON, tables as HTML

Whatever a run recorded is text here: policies write reasons, users name metrics, and a trace is a
file of its own. So all of it is escaped, and the page's policy lets nothing be loaded.
"""

from __future__ import annotations

import json
from datetime import datetime
from html import escape
from pathlib import Path

from pipetransformer.durable_files import replace_file
from pipetransformer.extras import require
from pipetransformer.report.records import (
    RECORDS_FILE,
    Record,
    latest_branch,
    of_kind,
    read_records,
)
from pipetransformer.report.sections import Rows, Section, is_pipeline, sections_of

PAGE_FILE = "report.html"

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #2b2f36; max-width: 1100px;
       margin: 24px auto; padding: 0 20px; }
h1 { margin-bottom: 4px; } h2 { margin-top: 44px; border-bottom: 1px solid #d5d8dd; }
nav a { margin-right: 16px; color: #0b6fb8; }
dl { display: flex; flex-wrap: wrap; gap: 8px 32px; } dt { color: #6c727b; } dd { margin: 0; }
dd { font-weight: 600; }
.rows { max-height: 420px; overflow: auto; }
table { border-collapse: collapse; } th { position: sticky; top: 0; background: white; }
th, td { text-align: left; padding: 4px 14px 4px 0; vertical-align: top;
         border-bottom: 1px solid #eceef1; font-variant-numeric: tabular-nums; }
"""

_DRAW = """
const figures = JSON.parse(document.getElementById("figures").textContent);
for (const [id, figure] of Object.entries(figures))
  Plotly.newPlot(id, figure.data, figure.layout, {
    responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"],
  });
"""


def write_page(folder: Path) -> None:
    """Write report.html into a run's folder, whole or not at all.

    Raises:
        ImportError: plotly is not installed.
        ValueError: the folder holds no records, or a damaged line of them.
    """
    require("plotly", purpose="report.html")
    from plotly.offline import get_plotlyjs  # It is 5 MB, which training does without.

    path = folder / RECORDS_FILE
    records = latest_branch(read_records(path))
    facts = _facts(records, written=datetime.fromtimestamp(path.stat().st_mtime))
    name, sections = folder.resolve().name, sections_of(records, folder)
    page = page_of(name, facts, sections, script=get_plotlyjs())
    replace_file(folder / PAGE_FILE, page.encode())


def run_is_over(records: list[Record]) -> bool:
    """Return whether a run has said that it is over, and has not gone on since."""
    marks = [record["kind"] for record in records if record["kind"] in ("step", "end")]
    return marks[-1:] == ["end"]


def page_of(name: str, facts: Rows, sections: list[Section], *, script: str) -> str:
    """Return the page's HTML.

    Args:
        facts: names and values, below the heading.
        script: plotly's.
    """
    figures = {
        f"figure-{index}-{number}": figure
        for index, section in enumerate(sections)
        for number, figure in enumerate(section.figures)
    }
    links = "".join(
        f'<a href="#section-{index}">{escape(section.title)}</a>'
        for index, section in enumerate(sections)
    )
    listed = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in facts)
    body = "".join(_section_html(index, section) for index, section in enumerate(sections))
    # A JSON text may hold "</script>", which would end the element that it stands in.
    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width"><title>{escape(name)}</title>
<style>{_STYLE}</style></head><body>
<h1>{escape(name)}</h1>
<dl>{listed}</dl><nav>{links}</nav>
{body}
<script type="application/json" id="figures">{data}</script>
<script>{script}</script>
<script>{_DRAW}</script>
</body></html>
"""


def _section_html(index: int, section: Section) -> str:
    notes = "".join(f"<p>{escape(note)}</p>" for note in section.notes)
    figures = "".join(
        f'<div class="figure" id="figure-{index}-{number}"></div>'
        for number in range(len(section.figures))
    )
    heading = f'<h2 id="section-{index}">{escape(section.title)}</h2>'
    figures, table = section.picture + figures, _table_html(section.table)
    return f"<section>{heading}{notes}{figures}{table}</section>\n"


def _table_html(rows: Rows) -> str:
    if not rows:
        return ""
    tags = ["th", *["td"] * (len(rows) - 1)]
    cells = (
        "".join(f"<{t}>{escape(c)}</{t}>" for c in row) for t, row in zip(tags, rows, strict=True)
    )
    return f'<div class="rows"><table>{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'


def _facts(records: list[Record], *, written: datetime) -> Rows:
    """Say where the run is, and how far."""
    steps = of_kind(records, "step")
    num_done = steps[-1]["step"] + 1 if steps else 0
    lengths = [one["max_steps"] for one in of_kind(records, "decision") if "max_steps" in one]
    most = lengths[-1] if lengths else None
    state = "over"
    if not run_is_over(records):  # Nothing in a folder tells a killed run from a slow one.
        is_done = most is not None and num_done >= most
        going = "all steps are done" if is_done else "going on, or killed"
        state = f"{going}; it last wrote at {written:%Y-%m-%d %H:%M:%S}"
    if not steps:
        return (("run", state), ("steps", "none yet"))
    last = steps[-1]
    frozen, length, replicas = (last.get(name, "?") for name in ("frozen", "length", "replicas"))
    return (
        ("run", state),
        ("steps", f"{num_done:,}" + ("" if most is None else f" of {most:,}")),
        ("samples", f"{sum(step.get('samples') or 0 for step in steps):,}"),
        ("seconds", f"{records[-1]['elapsed_s']:,.1f}"),
        ("frozen layers", str(frozen)),
        *([("K x R", f"{length} x {replicas}")] if is_pipeline(records) else []),
    )

"""Record a run, tell callbacks of it, show its progress, and draw it.

run_log           turns steps and transitions into records, progress and lines
records           records.jsonl, written and read; decisions among them
progress          the bar
fit_report        the table at the end, and closing lines
callbacks         events for the user's callbacks; tensorboard is one of these
pictures          report.png: learning, pipelines, time
freeze_pictures   freezing.png: signals and decisions
page              report.html: all of it; sections, page_figures and trace_section are its parts
"""

from pipetransformer.report.callbacks import Callback, Events, check_callbacks
from pipetransformer.report.fit_report import FitReport
from pipetransformer.report.freeze_pictures import decision_table, draw_freezing
from pipetransformer.report.page import PAGE_FILE, watch_page, write_page
from pipetransformer.report.pictures import (
    breakdown_table,
    draw_folder,
    draw_report,
    new_figure,
    open_frame,
)
from pipetransformer.report.records import (
    RECORDS_FILE,
    Record,
    RecordedDecision,
    finite,
    latest_branch,
    read_decisions,
    read_records,
)
from pipetransformer.report.run_log import RunLog
from pipetransformer.report.tensorboard import TensorBoard

__all__ = [
    "Callback", "Events", "FitReport", "PAGE_FILE", "RECORDS_FILE", "Record", "RecordedDecision",
    "RunLog", "TensorBoard", "breakdown_table", "check_callbacks", "decision_table", "draw_folder",
    "draw_freezing", "draw_report", "finite", "latest_branch", "new_figure", "open_frame",
    "read_decisions", "read_records", "watch_page", "write_page",
]  # fmt: skip

"""Record a run, tell callbacks of it, show its progress, and draw it.

run_log ─► decision_records, records ─► pictures, freeze_pictures ─► figure_style     fit_report
        └► closing_lines: what the cache spared, or a policy saw
callbacks: what may be overridden, and is called      tensorboard: one of them
"""

from pipetransformer.report.callbacks import Callback, Events, check_callbacks
from pipetransformer.report.fit_report import FitReport
from pipetransformer.report.freeze_pictures import decision_table, draw_freezing
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
    "Callback", "Events", "FitReport", "RECORDS_FILE", "Record", "RecordedDecision", "RunLog",
    "TensorBoard", "breakdown_table", "check_callbacks", "decision_table", "draw_folder",
    "draw_freezing", "draw_report", "finite", "latest_branch", "new_figure", "open_frame",
    "read_decisions", "read_records",
]  # fmt: skip

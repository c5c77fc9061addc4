"""Record a run, show its progress, and draw it.

run_log ─► decision_records, records ─► pictures, freeze_pictures ─► figure_style     fit_report
        ├► closing_lines: what the cache spared, or a policy saw
        └► progress: the bar
"""

from pipetransformer.report.decision_records import RecordedDecision, read_decisions
from pipetransformer.report.figure_style import new_figure, open_frame
from pipetransformer.report.fit_report import FitReport
from pipetransformer.report.freeze_pictures import decision_table, draw_freezing
from pipetransformer.report.pictures import breakdown_table, draw_folder, draw_report
from pipetransformer.report.records import (
    RECORDS_FILE,
    Record,
    finite,
    latest_branch,
    read_records,
)
from pipetransformer.report.run_log import RunLog

__all__ = [
    "FitReport", "RECORDS_FILE", "Record", "RecordedDecision", "RunLog", "breakdown_table",
    "decision_table", "draw_folder", "draw_freezing", "draw_report", "finite", "latest_branch",
    "new_figure", "open_frame", "read_decisions", "read_records",
]  # fmt: skip

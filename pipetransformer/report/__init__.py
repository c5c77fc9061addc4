"""Record a run, tell callbacks of it, show its progress, and draw it as a page.

run_log           turns steps and transitions into records, progress and lines
run_sums          what they add up to
records           records.jsonl, written and read; decisions among them
progress          the bar
fit_report        the table at the end
saved_time        the line at the end: what freezing and rows have saved
callbacks         events for the user's callbacks
score             what policies would have frozen in a recorded run, and saved
page              report.html; sections are its parts, picture moves
"""

from pipetransformer.report.callbacks import Callback, Events, check_callbacks
from pipetransformer.report.fit_report import FitReport
from pipetransformer.report.page import PAGE_FILE, run_is_over, write_page
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
from pipetransformer.report.saved_time import SavedTime
from pipetransformer.report.score import add_score_parser, recorded_score, score
from pipetransformer.report.sections import similarities

__all__ = [
    "Callback", "Events", "FitReport", "PAGE_FILE", "RECORDS_FILE", "Record", "RecordedDecision",
    "RunLog", "SavedTime", "add_score_parser", "check_callbacks", "finite", "latest_branch",
    "read_decisions", "read_records", "recorded_score", "run_is_over", "score", "similarities",
    "write_page",
]  # fmt: skip

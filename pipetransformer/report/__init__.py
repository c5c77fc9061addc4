"""Record a run, show its progress, and draw it.

run_log ─► records          fit_report      pictures
"""

from pipetransformer.report.fit_report import FitReport
from pipetransformer.report.pictures import breakdown_table, draw_folder, draw_report
from pipetransformer.report.records import RECORDS_FILE, Record, read_records
from pipetransformer.report.run_log import RunLog

__all__ = [
    "FitReport", "RECORDS_FILE", "Record", "RunLog", "breakdown_table", "draw_folder",
    "draw_report", "read_records",
]  # fmt: skip

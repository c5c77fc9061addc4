"""Serve rows in the place of what is frozen, in a loop of one's own.

row_service: one model, one data set
  ├─► model_check: which models have none
  ├─► loop_model: what a look at both finds ─► frozen_blocks, frozen_parts, released_parts
  ├─► row_probe: may there be rows?            row_account: what they cost, and save
  └─► row_batches: a loader's batches, of rows
evaluation_rows: the same for what is evaluated    part_check: the same for a Trainer's parts
"""

from pipetransformer.loop.rows.evaluation_rows import MOST_EVALUATIONS, EvaluationRows
from pipetransformer.loop.rows.part_check import refuse_wrong_rows
from pipetransformer.loop.rows.row_service import RowService
from pipetransformer.loop.rows.settings import (
    CACHE,
    PARTS,
    READS_ALL,
    check_settings,
    settings_of_parts,
)

__all__ = [
    "CACHE", "EvaluationRows", "MOST_EVALUATIONS", "PARTS", "READS_ALL", "RowService",
    "check_settings", "refuse_wrong_rows", "settings_of_parts",
]  # fmt: skip

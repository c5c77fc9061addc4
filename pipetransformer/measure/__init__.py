"""Time the live devices, for the planner.

measurements ─► stretches ─► sublayer_times, touched_rows      link_times      reading_times
"""

from pipetransformer.measure.measurements import Measurements, largest_micro_batch, measure
from pipetransformer.measure.stretches import held_on

__all__ = [
    "Measurements", "held_on", "largest_micro_batch", "measure",
]  # fmt: skip

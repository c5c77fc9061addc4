"""Time the live devices, for the planner.

measurements ─► stretches ─► sublayer_times, touched_rows      link_times      reading_times
"""

from pipetransformer.measure.measurements import Measurements, measure
from pipetransformer.measure.stretches import held_on

__all__ = [
    "Measurements", "held_on", "measure",
]  # fmt: skip

"""Time the live devices, for the planner.

measure ─► stretches ─► sublayer_times      link_times      reading_times
"""

from pipetransformer.measure.measurements import MEASURE_GUESS_S, Measurements, measure
from pipetransformer.measure.stretches import held_on

__all__ = [
    "MEASURE_GUESS_S", "Measurements", "held_on", "measure",
]  # fmt: skip

"""Time the live devices, for the planner.

measure ─► stretches ─► sublayer_times      link_times      reading_times
"""

from pipetransformer.measure.measurements import MEASURE_GUESS_S, Measurements, measure
from pipetransformer.measure.stretches import lent

__all__ = ["MEASURE_GUESS_S", "Measurements", "lent", "measure"]

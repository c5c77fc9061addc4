"""Measure what sublayers, links and reading cost on the live devices, for the planner.

measurements      all of it, agreed between the ranks
kinds             which sublayers are timed
spans             sublayers on the device, as many at a time as fit
sublayer_times    alone, in updates, and rows that stay zeros
link_times        messages and sums
reading_times     samples and cached rows
timing            how often, and with cold caches
"""

from pipetransformer.measure.measurements import largest_micro_batch, measure
from pipetransformer.measure.spans import held_on

__all__ = ["held_on", "largest_micro_batch", "measure"]

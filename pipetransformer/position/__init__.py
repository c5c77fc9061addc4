"""Say where a run is, and what comes: its steps, decisions and pauses, and their samples.

timeline: position, clock ─► coming_batches
"""

from pipetransformer.position.coming_batches import ComingBatches, ComingStep
from pipetransformer.position.timeline import Clock, Position, Timeline

__all__ = ["Clock", "ComingBatches", "ComingStep", "Position", "Timeline"]

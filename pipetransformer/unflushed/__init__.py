"""Train a rank's stage without a flush between steps, as PipeDream does.

stream_work: what a stage computes on a stream of steps ─► unflushed_stage ◄─ stage/
"""

from pipetransformer.unflushed.unflushed_stage import UnflushedStage

__all__ = ["UnflushedStage"]

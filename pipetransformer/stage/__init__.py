"""Do one rank's part of a step.

feed ─► work ─► stage: forwards, backwards, sums, update
          ▲       └─ device_end: the same end, decided by the only GPU of a run
wiring: links and side_inputs     health, nonfinite_origin: what is refused
"""

from pipetransformer.stage.batch_cut import BatchCut
from pipetransformer.stage.health import written_text
from pipetransformer.stage.stage import Stage
from pipetransformer.stage.step_result import StepNumbers, StepResult, StepSums, broken_down
from pipetransformer.stage.work import Results, TrainWork

__all__ = [
    "BatchCut", "Results", "Stage", "StepNumbers", "StepResult", "StepSums", "TrainWork",
    "broken_down", "written_text",
]  # fmt: skip

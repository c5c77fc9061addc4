"""Do one rank's part of a step, and of an evaluation.

feed ─► work ─► stage: forwards, backwards, sums, update        unflushed: PipeDream's
          ▲       └─ device_end: the same end, decided by the only GPU of a run
wiring: links and side_inputs     health, nonfinite_origin, bad_samples: what is refused
evaluator ─► predictions: kept, brought together, judged
"""

from pipetransformer.stage.batch_cut import BatchCut
from pipetransformer.stage.evaluator import Evaluator
from pipetransformer.stage.predictions import EvalPrediction, PredictionOutput, judge
from pipetransformer.stage.refusals import written_text
from pipetransformer.stage.stage import Stage
from pipetransformer.stage.step_result import StepResult
from pipetransformer.stage.unflushed import UnflushedStage

__all__ = [
    "BatchCut", "EvalPrediction", "Evaluator", "PredictionOutput", "Stage", "StepResult",
    "UnflushedStage", "judge", "written_text",
]  # fmt: skip

"""Do one rank's part of a step, and of an evaluation.

feed ─► stage: reads, runs, sums, updates        asynchronous: the same without flushes
          ├─ work: forwards and losses           wiring: links to the other stages; side_inputs
          ├─ trained_part: weights, optimizer, sums of gradients
          ├─ step_end: update or skip, decided by the host; device_end: by the GPUs
          ├─ stage_watch: what was changed, or written by a forward
          └─ refusals: what must not train on, and where it began; bad_samples: by which sample
evaluator ─► predictions: kept, brought together, judged
"""

from pipetransformer.stage.asynchronous import AsynchronousStage
from pipetransformer.stage.batch_cut import BatchCut
from pipetransformer.stage.evaluator import Evaluator
from pipetransformer.stage.predictions import EvalPrediction, PredictionOutput, judge
from pipetransformer.stage.stage import Stage
from pipetransformer.stage.stage_watch import written_text
from pipetransformer.stage.step_result import StepResult

__all__ = [
    "BatchCut", "EvalPrediction", "Evaluator", "PredictionOutput", "Stage", "StepResult",
    "AsynchronousStage", "judge", "written_text",
]  # fmt: skip

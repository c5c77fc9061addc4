"""Do one rank's part of a step, and of an evaluation.

feed ─► stage: reads, runs, sums, updates        asynchronous: the same without flushes
          ├─ batch_cut: which samples a rank takes
          ├─ wiring: links to other stages       side_inputs, tied_gradients: their messages
          ├─ work: forwards and losses           bad_samples: which one the model cannot take
          ├─ trained_part: weights, optimizer, sums of gradients
          ├─ step_end: update or skip, decided by the host; device_end: by the GPUs
          ├─ step_graphs: whole steps at once, from step_capture
          └─ stage_watch: what was changed or written; refusals: what must not train on, and why
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

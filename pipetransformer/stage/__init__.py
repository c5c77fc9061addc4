"""Do one rank's part of a step.

frozen_prefix ─► sample_feed ─► work ─► stage: forwards, backwards, sums, update
     node_store ─►┘               ▲
       wiring: links and side_inputs     health, nonfinite: what is refused
"""

from pipetransformer.stage.batch_cut import BatchCut
from pipetransformer.stage.frozen_prefix import FrozenPrefix
from pipetransformer.stage.health import written_text
from pipetransformer.stage.sample_feed import SampleFeed
from pipetransformer.stage.stage import Stage, StepResult
from pipetransformer.stage.work import LossSums, Results

__all__ = [
    "BatchCut", "FrozenPrefix", "LossSums", "Results", "SampleFeed", "Stage", "StepResult",
    "written_text",
]  # fmt: skip

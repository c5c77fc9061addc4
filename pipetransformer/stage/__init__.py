"""Do one rank's part of a step.

frozen_prefix ─► work ─► stage: forwards, backwards, sums, update
                   ▲
wiring: links and side_inputs         forward_writes, loss_probe, nonfinite: what is refused
"""

from pipetransformer.stage.forward_writes import refuse_forward_writes
from pipetransformer.stage.frozen_prefix import FrozenPrefix
from pipetransformer.stage.stage import Stage, StepResult
from pipetransformer.stage.work import LossSums

__all__ = ["FrozenPrefix", "LossSums", "Stage", "StepResult", "refuse_forward_writes"]

"""Do one rank's part of a step.

frozen_prefix ─► work ─► stage: forwards, backwards, sums, update
                   ▲
wiring: links and side_inputs         watch, loss_probe, nonfinite: what is refused
"""

from pipetransformer.stage.frozen_prefix import FrozenPrefix
from pipetransformer.stage.loss_probe import SplitProbe
from pipetransformer.stage.stage import Stage, StepResult
from pipetransformer.stage.watch import written_text
from pipetransformer.stage.work import LossSums

__all__ = [
    "FrozenPrefix", "LossSums", "SplitProbe", "Stage", "StepResult", "written_text",
]  # fmt: skip

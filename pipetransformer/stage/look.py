"""Look at what each layer makes of a fixed batch."""

from __future__ import annotations

from typing import final

from torch import Tensor

from autopipe.engine import Payload
from freeze.signals import gram
from pipetransformer.stage.work import LayerWork, MicroBatches, StageLayers


@final
class LookWork(LayerWork):
    """Keep the Gram matrix of each layer's outputs, by layer, in `grams`."""

    def __init__(self, layers: StageLayers, batches: MicroBatches) -> None:
        super().__init__(layers, batches)
        self.grams: dict[int, Tensor] = {}

    def see(self, index: int, output: Tensor) -> None:
        sublayers = self.layers.task.model.sublayers
        layer = sublayers[index].layer
        # Above it there is the head at least.
        if layer < self.layers.task.model.num_layers and sublayers[index + 1].layer != layer:
            self.grams[layer] = gram(output)

    def finish(self, micro_batch: int, outputs: Payload) -> None:
        """Need no loss."""

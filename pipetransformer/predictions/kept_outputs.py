"""Keep a replica's outputs and targets in host memory while a data set passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

OUTPUT = "output of the model"
"""Its name beside the targets, which have their own."""
IDS = "place in the data set"
"""The name of what says which row is which sample's."""


@final
class KeptOutputs:
    """Hold the outputs of a replica's last stage and their targets, micro-batch by micro-batch.

    Nothing of it stays on a device. Floating numbers are kept in float32: numpy knows no bfloat16,
    and nobody asks for float64.
    """

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, output: Tensor, targets: Mapping[str, Tensor], ids: Tensor) -> None:
        """Keep a micro-batch's output and targets, (n, ...) each, and which samples these are."""
        for name, tensor in {OUTPUT: output, IDS: ids, **targets}.items():
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            # A copy in any case: a loss may write into what it is given.
            copy = tensor.detach().to("cpu", dtype, copy=True)
            self.parts.setdefault(name, []).append(copy)

    def describe(self) -> dict[str, Any]:
        """Say of each entry, in plain values, how many rows it has, of which dtype and shapes."""
        return {
            name: {
                "rows": sum(map(len, parts)),
                "dtype": str(parts[0].dtype).removeprefix("torch."),
                "shapes": [list(shape) for shape in {part.shape[1:] for part in parts}],
            }
            for name, parts in self.parts.items()
        }

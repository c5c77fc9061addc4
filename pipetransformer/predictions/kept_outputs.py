"""Keep a replica's outputs and targets in host memory while a data set passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from pipetransformer.config import PreprocessLogits
from pipetransformer.errors import CallbackError

OUTPUT = "output of the model"
"""Its name beside the targets, which have their own."""
IDS = "place in the data set"
"""The name of what says which row is which sample's."""

_Entry = TypeVar("_Entry")


def as_labels(targets: Iterable[_Entry]) -> _Entry | tuple[_Entry, ...] | None:
    """Return a model's only target, a tuple of several, or None for none."""
    labels = tuple(targets)
    return (labels[0] if len(labels) == 1 else labels) if labels else None


@final
class KeptOutputs:
    """Hold the outputs of a replica's last stage and their targets, micro-batch by micro-batch.

    Nothing of it stays on a device. Floating numbers are kept in float32: numpy knows no bfloat16,
    and nobody asks for float64.

    Args:
        preprocess: makes of a micro-batch's outputs and targets what is kept of the outputs.
    """

    def __init__(self, preprocess: PreprocessLogits | None = None) -> None:
        self._preprocess = preprocess
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, output: Tensor, targets: Mapping[str, Tensor], ids: Tensor) -> None:
        """Keep a micro-batch's output and targets, (n, ...) each, and which samples these are.

        Raises:
            CallbackError: `preprocess` raised.
            TypeError: it returned no tensor of as many rows.
        """
        if self._preprocess is not None:
            # Copies, as the loss and the metrics are still to see what the model put out.
            labels = as_labels(target.clone() for target in targets.values())
            output = _preprocessed(self._preprocess, output.detach().clone(), labels)
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


def _preprocessed(preprocess: PreprocessLogits, output: Tensor, labels: Any) -> Tensor:
    try:
        made = preprocess(output, labels)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise CallbackError(f"preprocess_logits_for_metrics raised {what}") from error
    if not isinstance(made, Tensor) or made.ndim == 0 or len(made) != len(output):
        shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise TypeError(
            f"preprocess_logits_for_metrics returned {shape} for outputs of "
            f"{tuple(output.shape)}; return a tensor of as many rows"
        )
    return made

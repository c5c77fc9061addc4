"""Run forwards on the meta device that look at values, such as whether a mask is all true.

There are no values there. A truth that is asked for is taken to be yes, as of the mask of a text
without padding; a number that is asked for is an error as ever.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


@final
class FullMasks(TorchDispatchMode):
    """Answer yes where a meta tensor's truth is asked for, and note in `asked` that it was."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if packet is _aten._local_scalar_dense and args[0].dtype == torch.bool:
                self.asked = True
                return True
            if packet is _aten.equal:
                # Two tensors without values differ in nothing but their shapes.
                return args[0].shape == args[1].shape
            if packet is _aten._to_copy:
                # There is nothing to copy elsewhere.
                kwargs = {**kwargs, "device": args[0].device}
        return func(*args, **kwargs)

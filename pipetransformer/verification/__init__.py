"""Hold what is trained here against the model's own forward and plain autograd.

    model's own forward  ─┐
                          ├─ equal?   local.py      on rank 0: outputs, splits, buffers, loss
    layers one by one    ─┘
    plain loop           ─┐
                          ├─ equal?   pipelined.py  on all ranks: loss, gradients, weights
    pipelines of a twin  ─┘

Everything happens on twins of the model (twin.py); the model itself is not touched.
"""

from pipetransformer.verification.compare import Verification, verify

__all__ = [
    "Verification", "verify",
]  # fmt: skip

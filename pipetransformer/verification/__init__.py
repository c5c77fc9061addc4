"""Hold what is trained here against the model's own forward and plain autograd.

local      on rank 0: layers one by one, against the model's own forward
pipelined  on all ranks: pipelines, against a plain loop

Everything happens on twins of the model (model_copy); the model itself is not touched.
"""

from pipetransformer.verification.compare import Verification, verify

__all__ = [
    "Verification", "verify",
]  # fmt: skip

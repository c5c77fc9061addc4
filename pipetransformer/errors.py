"""Name every error that a user of the package may meet beside ValueError and TypeError."""

from __future__ import annotations

from autodp import PeerError as PeerError


class NonFiniteError(FloatingPointError):
    """Say at which step a loss or a gradient stopped being a number, and where that began."""


class CallbackError(RuntimeError):
    """Name the callback, or the function that computes metrics, that raised, and on which rank."""


class CorruptCheckpointError(RuntimeError):
    """Report a checkpoint's file that is missing, truncated or changed; the message names it."""


class WorkerFailedError(RuntimeError):
    """Name the rank that ended a run, and how it ended."""


class VerificationError(ValueError):
    """Name the first sublayer, parameter or buffer with which training would go wrong."""

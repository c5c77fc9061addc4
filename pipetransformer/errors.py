"""Define the errors that a user may meet, other than ValueError and TypeError."""

from __future__ import annotations

from autodp import PeerError as PeerError


class NonFiniteError(FloatingPointError):
    """Report a NaN or infinite loss or gradient; the message names the step and where it began."""


class CallbackError(RuntimeError):
    """Report an error of a callback or a metrics function; the message names it and its rank."""


class CorruptCheckpointError(RuntimeError):
    """Report a checkpoint's file that is missing, truncated or changed; the message names it."""


class WorkerFailedError(RuntimeError):
    """Report a rank that ended a launched run; the message names it, and how it ended."""


class VerificationError(ValueError):
    """Report a model that would train wrongly; the message names its first faulty part."""

"""Name the extra to install where an optional package is missing."""

from __future__ import annotations

from importlib.util import find_spec

_EXTRAS = {
    "plotly": "report",
    "timm": "vision",
    "transformers": "text",
    "accelerate": "text",
    "peft": "text",
}
"""Extras by package, as in setup.cfg."""


def require(package: str, *, purpose: str, extra: str | None = None) -> None:
    """Check that an optional package is installed, without importing it.

    Args:
        extra: that is named instead of the package's own.
    Raises:
        ImportError: it is not; the message tells its purpose, and how to install it.
    """
    if find_spec(package) is None:
        raise ImportError(
            f"{purpose} needs the package {package}; install "
            f"pipetransformer[{extra or _EXTRAS[package]}]"
        )

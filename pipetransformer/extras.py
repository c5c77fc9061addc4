"""Say which extra to install where an optional package is missing."""

from __future__ import annotations

from importlib.util import find_spec

_EXTRAS = {
    "matplotlib": "report",
    "tensorboard": "report",
    "timm": "vision",
    "transformers": "text",
    "accelerate": "text",
}
"""The extra that installs a package, as in setup.cfg."""


def require(package: str, *, purpose: str) -> None:
    """Do nothing where an optional package is installed; it is not imported yet.

    Raises:
        ImportError: it is not; the message says for what it is needed, and how to install it.
    """
    if find_spec(package) is None:
        raise ImportError(
            f"{purpose} needs the package {package}; install pipetransformer[{_EXTRAS[package]}]"
        )

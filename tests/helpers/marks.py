"""Mark parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Leave a test out of `make test` for these values; others show the same there."""
    return pytest.param(*values, marks=pytest.mark.slow)

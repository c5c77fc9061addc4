"""Put hooks and forwards on a model that do nothing on its copies, and on its pickles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import nn


@final
@dataclass(frozen=True)
class BlockForward:
    """Be a block's forward. A copy or a pickle of the block gets its own forward.

    Args:
        own: what the block itself had in its class's place.
    """

    block: nn.Module
    own: Callable[..., Any] | None
    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A block's copy exists when its attributes are copied, and has its class's forward yet.
        return (getattr, (self.block, "forward")) if self.own is None else (_same, (self.own,))


@final
@dataclass(frozen=True)
class ModelHook:
    """Be a hook on a module. On a copy or a pickle of it, it does nothing.

    Args:
        runs_on_copy: whether it runs when such a copy is made, without arguments.
    """

    call: Callable[..., Any]
    runs_on_copy: bool = False

    def __call__(self, *given: Any) -> Any:
        return self.call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.runs_on_copy:
            self.call()
        return ModelHook, (_ignore,)


def _same(value: Any) -> Any:
    return value


def _ignore(*_: object) -> None:
    """Do nothing."""

"""Follow one forward of a model whose parts are frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten

from pipetransformer.model.forward import Reads


@dataclass
class PartRecord:
    """Follow one forward: what parts were given and returned, and what was read before them."""

    parts: Mapping[str, nn.Module]
    forwards: dict[nn.Module, Callable[..., Any]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    answers: dict[str, tuple[list[Any], TreeSpec]] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    below: set[nn.Module] = field(default_factory=set)
    above: set[nn.Module] = field(default_factory=set)
    selects: bool = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        self.forwards = {part: part.forward for part in self.parts.values()}
        with ExitStack() as stack:
            for name, part in self.parts.items():
                note = torch.compiler.disable(partial(self._note_call, name))
                stack.callback(part.register_forward_pre_hook(note).remove)
            runs = (partial(self._run, *one) for one in self.parts.items())
            noting = [torch.compiler.disable(run) for run in runs]
            stack.enter_context(replaced(tuple(self.parts.values()), noting))
            note = torch.compiler.disable(self._note_module)
            stack.callback(register_module_forward_pre_hook(note).remove)
            stack.enter_context(Reads(self._note_read))
            stack.enter_context(_Operations(self._note_operation))
            stack.enter_context(Lists(self._note_list))
            yield

    def anew(self) -> PartRecord:
        """Return a record of another forward, which adds to what was read and called."""
        return replace(self, order=[], answers={})

    @property
    def is_reached(self) -> bool:
        """Return whether all parts have answered."""
        return len(self.answers) == len(self.parts)

    @property
    def leaves(self) -> list[Any]:
        """Return the leaves of all answers."""
        return [leaf for leaves, _ in self.answers.values() for leaf in leaves]

    def _note_call(self, name: str, *_: object) -> None:
        self.order.append(name)

    def _run(self, name: str, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # What `forward` returns, as hooks act where rows are handed on, too.
        answer = self.forwards[part](*args, **kwargs)
        self.answers[name] = tree_flatten(answer)  # A model may change it afterwards.
        return answer

    def _note_module(self, module: nn.Module, _args: object) -> None:
        (self.above if self.is_reached else self.below).add(module)

    def _note_operation(self, func: Any, args: Sequence[Any]) -> None:
        if self.is_reached:
            return
        # A whole number may say how many are taken, as `x[:n]` does.
        self.selects |= func is torch.ops.aten._local_scalar_dense.default and _counts(args[0])
        # Samples that are sorted, by their lengths, have another order beside others.
        self.selects |= func.overloadpacket in _SORTING and args[0].ndim == 1
        if torch.Tag.dynamic_output_shape not in func.tags:
            return
        # Whole numbers take as many as they are; others as many as the values say.
        indices = args[1] if func is torch.ops.aten.index.Tensor else [None]
        kinds = {None if one is None else one.dtype for one in indices}
        self.selects |= func is not torch.ops.aten.index.Tensor or bool(kinds & {*_MASKS})

    def _note_list(self, one: Tensor) -> None:
        self.selects |= not self.is_reached and _counts(one)

    def _note_read(self, identity: int) -> None:
        if not self.is_reached:
            self.read.add(identity)


_MASKS = (torch.bool, torch.uint8)
_SORTING = (torch.ops.aten.sort, torch.ops.aten.argsort, torch.ops.aten.topk)


def _counts(one: Tensor) -> bool:
    return one.dtype != torch.bool and not one.is_floating_point() and not one.is_complex()


@dataclass
class _Operations(TorchDispatchMode):
    """Note which operators of torch are called."""

    note: Callable[[Any, Sequence[Any]], None]

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.note(func, args)
        return func(*args, **(kwargs or {}))


@dataclass
class Lists(TorchFunctionMode):
    """Note the tensors whose values are taken past torch's operators."""

    note: Callable[[Tensor], None]

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self.note(args[0])
        return func(*args, **(kwargs or {}))


def served(
    parts: Sequence[nn.Module], answer: Callable[[int], Any]
) -> AbstractContextManager[None]:
    """Have parts return other answers within the block, without running."""
    forwards = [lambda *_, index=index, **__: answer(index) for index in range(len(parts))]
    return replaced(parts, forwards)


@contextmanager
def replaced(parts: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Have parts run others' forwards within the block."""
    had = [vars(part).get("forward") for part in parts]
    try:
        for part, forward in zip(parts, forwards, strict=True):
            part.forward = forward
        yield
    finally:
        for part, own in zip(parts, had, strict=True):
            if own is None:
                del part.forward
            else:
                part.forward = own

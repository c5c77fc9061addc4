"""Have frozen parts leave their device while rows take their place.

every sample has its row          a module of the parts runs, or the loop ends,
                                  or a state_dict or a copy of the model is made
device ─────── leave ───────►     host memory; of a CPU, a nameless file that is mapped
       ◄────── come back ────

Weights stay the same objects, and hold their values wherever they are: their `data` is swapped. So
what reads, edits or converts them meanwhile is right, and is noticed as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from pipetransformer.loop.forward import ModelHook
from pipetransformer.loop.rows.row_batches import RowBatches

_LOGGER = logging.getLogger(__name__)

_HOST = torch.device("cpu")


@final
class ReleasedParts:
    """Move a model's parts from their device, and back.

    Args:
        parts: by name.
        models: the one with the parts first; what they hold beside the parts stays.
        folder: of the file, where a CPU has the parts.
    Attributes:
        users: all that serve rows of the parts.
    """

    def __init__(
        self, parts: Mapping[str, nn.Module], models: tuple[nn.Module, ...], folder: Path
    ) -> None:
        self._parts, self._models, self._folder = dict(parts), models, folder
        self.users = WeakSet[RowBatches]()
        self._away: list[Tensor] = []
        self._at_runs, self._at_copies = list[RemovableHandle](), list[RemovableHandle]()

    @property
    def _name(self) -> str:
        return ", ".join(map(repr, self._parts))

    def leave(self) -> None:
        """Move what nobody else uses, and log the bytes that are free then."""
        first = next((p for part in self._parts.values() for p in part.parameters()), None)
        if self._away or first is None:
            return
        is_mapped = first.device.type == "cpu"
        to = partial(_mapped, folder=self._folder) if is_mapped else partial(_copied, device=_HOST)
        with self._moving():
            num_bytes = 0
            for group in self._leaving(first.device):
                if gain := _leave(group, to):
                    num_bytes += gain
                    self._away += group
        where = f"a file in {self._folder}" if is_mapped else "host memory"
        _LOGGER.info("%s left %s for %s: %d bytes", self._name, first.device, where, num_bytes)
        for part in self._parts.values():
            for module in part.modules():
                run = self._begin_part if module is part else self._begin_inner
                hook = ModelHook(torch.compiler.disable(run))
                # Behind the hook that finds out whether a forward has rows.
                self._at_runs.append(module.register_forward_pre_hook(hook))
        if not self._at_copies:
            for module in dict.fromkeys((self._models[0], *self._parts.values())):
                hook = ModelHook(self._begin_copy, runs_on_copy=True)
                self._at_copies.append(module.register_state_dict_pre_hook(hook))

    def come_back(self, why: str, *, level: int = logging.WARNING) -> None:
        """Move the parts to where their first weight is; say why."""
        if not self._away:
            return
        first = next(p for part in self._parts.values() for p in part.parameters())
        with self._moving():
            for group in _by_storage(self._away):
                _move(group, partial(_copied, device=first.device))
        self._away = []
        for handle in self._at_runs:
            handle.remove()
        self._at_runs.clear()
        _LOGGER.log(level, "%s came back to %s, as %s", self._name, first.device, why)

    def close(self) -> None:
        self.come_back("the loop has ended", level=logging.INFO)
        for handle in self._at_copies:  # Not before: a copy walks through the hooks it meets.
            handle.remove()

    def _begin_part(self, *_: object) -> None:
        if not any(user.forward.is_serving for user in self.users):
            self._begin_inner()

    def _begin_inner(self, *_: object) -> None:
        self.come_back("a forward has no rows of them: a sample is new, or others are given")

    def _begin_copy(self, *_: object) -> None:
        self.come_back("the model's state is copied")

    def _leaving(self, device: torch.device) -> list[list[Tensor]]:
        """Return what leaves a device, by the memory it lies in.

        A part's first weight stays, as code asks it for a module's device. So does what the model
        holds itself: its copy would have it before a hook is met.
        """
        inner = {module for part in self._parts.values() for module in part.modules()}
        apart = {*self._parts.values()}
        beside = [m for model in self._models for _, m in model.named_modules(memo={*apart})]
        staying: list[Tensor | None] = [next(part.parameters(), None) for part in apart]
        staying += [one for module in (*beside, self._models[0]) for one in _held(module)]
        memory = {_memory(one) for one in staying if one is not None and _is_plain(one)}
        # DDP broadcasts buffers in each forward, on the device.
        has_group = dist.is_available() and dist.is_initialized()
        own = (one for module in inner for one in _held(module, buffers=not has_group))
        here = [one for one in own if _is_plain(one) and one.device == device]
        return [
            group
            for group in _by_storage(here)
            if _memory(group[0]) not in {0, *memory} and len({one.dtype for one in group}) == 1
        ]

    @contextmanager
    def _moving(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            for user in self.users:
                stack.enter_context(user.feed.prefix.moving())
            yield


def _held(module: nn.Module, *, buffers: bool = True) -> list[Tensor]:
    held = [*module._parameters.values(), *(module._buffers.values() if buffers else ())]
    return [one for one in held if one is not None]


def _is_plain(tensor: Tensor) -> bool:
    is_whole = tensor.layout is torch.strided and not tensor.is_meta
    return is_whole and not is_traceable_wrapper_subclass(tensor)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors that share memory, such as a recurrent layer's weights: they go on to."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in dict.fromkeys(tensors):
        groups.setdefault(_memory(tensor), []).append(tensor)
    return [*groups.values()]


def _leave(tensors: list[Tensor], to: Callable[[Tensor], Tensor]) -> int:
    """Move tensors of one memory; return its bytes if that is free now, else leave them there."""
    device, storage = tensors[0].device, tensors[0].untyped_storage()
    num_bytes, left = storage.nbytes(), StorageWeakRef(storage)
    del storage
    _move(tensors, to)
    if left.expired():
        return num_bytes
    # A view that somebody holds keeps it. Nothing is gained, and an edit by it would be lost.
    storage = torch.UntypedStorage._new_with_weak_ptr(left.cdata)
    for one in tensors:
        empty = torch.empty(0, dtype=one.dtype, device=device)
        one.data = empty.set_(storage, one.storage_offset(), one.shape, one.stride())
    return 0


def _move(tensors: list[Tensor], to: Callable[[Tensor], Tensor]) -> None:
    """Have tensors of one memory lie alike in what `to` returns of all of it, (N,)."""
    first = tensors[0]
    num = first.untyped_storage().nbytes() // first.element_size()
    moved = to(first.as_strided((num,), (1,), 0))
    for one in tensors:
        one.data = moved.as_strided(one.shape, one.stride(), one.storage_offset())


def _copied(flat: Tensor, *, device: torch.device) -> Tensor:
    return flat.to(device, copy=True)


def _mapped(flat: Tensor, *, folder: Path) -> Tensor:
    """Return a copy that lies in a file, which ends with it; what is written into it does not."""
    with NamedTemporaryFile(dir=folder) as file:
        file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        return torch.from_file(
            file.name, shared=False, size=len(flat), dtype=flat.dtype, device="cpu"
        )

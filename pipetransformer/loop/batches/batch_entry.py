"""An entry of a batch: a tensor that knows which rows of which batches it holds.

operation on an entry          its values were read        they were not
moves it, casts it             an entry, the same rows     the same
takes rows, joins them         an entry of those rows      the same (no bundle of several a sample)
asks for its shape             answers                     answers
changes it in place            it holds no rows any more   is refused
makes a view of its values     an entry without rows       is refused
computes of it                 a plain tensor              is refused

An entry that was not read has a shape, a dtype and a device, but no storage: nothing is moved, and
nothing can be computed of it by a way that was forgotten here. One that was read wraps its values.
It knows its rows as long as nobody can have changed these: their version tells, and whoever gets
at the memory itself (`numpy()`, `.data`) ends it, also by a view, which is followed for this.
Nothing is recognised by comparing values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


@final
@dataclass(frozen=True, eq=False)
class Mark:
    """Say what an entry holds.

    Args:
        name: of the entry, in its batches.
        batches: by number; who holds an entry, holds its batches, and so their rows.
        table: (R, 2) int64; each row's batch, by number, and its row there.
        is_bundle: whether the entry has several rows for one of the table, such as a sample's
            images.
    """

    name: str
    batches: dict[int, Any]
    table: Tensor
    is_bundle: bool = False

    def holds_same_rows(self, other: Mark) -> bool:
        return self.table is other.table or torch.equal(self.table, other.table)


@final
@dataclass
class _Memory:
    """Say whether somebody may have changed some values unseen. Views and copies share it."""

    is_exposed: bool = False


@final
class BatchEntry(Tensor):
    """Be an entry of a batch; see the module. `BatchEntry.read` and `unread` make one."""

    _mark: Mark | None
    _value: Tensor | None
    _device: torch.device
    _memory: _Memory
    _version_read: int | None
    _is_narrowed: bool = False

    @staticmethod
    def read(mark: Mark | None, value: Tensor, memory: _Memory | None = None) -> BatchEntry:
        """Return an entry of what was read, (R, ...); a view of one has no mark."""
        entry = _made(value.shape, value.dtype)
        entry._mark, entry._value, entry._device = mark, value, value.device
        entry._memory, entry._version_read = memory or _Memory(), _version(value)
        return entry

    @staticmethod
    def unread(
        mark: Mark, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> BatchEntry:
        """Return an entry of what was not read; its shape is that of one row."""
        entry = _made((len(mark.table), *shape), dtype)
        entry._mark, entry._value, entry._device = mark, None, device
        entry._memory, entry._version_read = _Memory(), None
        return entry

    def content(self) -> Tensor | None:
        """Return what was read; None where nothing was."""
        return self._value

    def mark(self) -> Mark | None:
        """Return what it holds; None where its values may have changed, or need a gradient."""
        value = self._value
        if value is not None:
            if self._memory.is_exposed or value.requires_grad or _version(value) is None:
                return None
            if value._version != self._version_read:
                return None
        return self._mark

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        # What is given by name alone has no rule: no rows are known of its result.
        done = NotImplemented if rule is None or not args else rule(func, args, kwargs)
        return _computed(func, args, kwargs) if done is NotImplemented else done

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # What is written in C++ comes here, past the rules, and versions do not count here.
        shares = any(one.alias_info is not None for one in func._schema.arguments)
        return _computed(func, args, kwargs or {}, exposes=shares)


def _made(shape: Sequence[int], dtype: torch.dtype) -> BatchEntry:
    # "meta", so that no kernel of any device takes it for one of its tensors.
    entry: BatchEntry = Tensor._make_wrapper_subclass(
        BatchEntry, torch.Size(shape), dtype=dtype, device=torch.device("meta")
    )
    return entry


def _version(value: Tensor) -> int | None:
    return None if value.is_inference() else value._version


def plain(value: Any) -> Any:
    """Return the values of an entry that was read; anything else as it is."""
    return value._value if isinstance(value, BatchEntry) and value._value is not None else value


def _computed(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, exposes: bool = False
) -> Any:
    """Call a function with the values of entries; refuse it for what was not read."""
    exposes = exposes or func in _EXPOSING or "out" in kwargs

    memories: list[tuple[int, _Memory]] = []

    def value_of(entry: BatchEntry) -> Tensor:
        if entry._value is None:
            assert entry._mark is not None
            raise ValueError(
                f"{_name_of(func)!r} was asked of {entry._mark.name!r}, which was not read, as "
                "the batch's samples have rows. A loop may move it, cast it to another float and "
                "take some of its samples. Change samples in the data set, or have them read: "
                f"reads=({entry._mark.name!r},)"
            )
        entry._memory.is_exposed |= exposes
        memories.append((_memory_of(entry._value), entry._memory))
        return entry._value

    def followed(tensor: Tensor) -> Tensor:
        """Follow a view of an entry: its memory may be changed by it."""
        if type(tensor) is not Tensor:
            return tensor
        own = _memory_of(tensor)
        memory = next((m for place, m in memories if place == own != -1), None)
        return tensor if memory is None else BatchEntry.read(None, tensor, memory)

    args, kwargs = tree_map_only(BatchEntry, value_of, (tuple(args), kwargs))
    answer = func(*args, **kwargs)
    # What hands memory out has ended the entry already.
    return answer if exposes else tree_map_only(Tensor, followed, answer)


def _memory_of(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; -1 where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or -1
    except (NotImplementedError, RuntimeError):
        return -1


def _name_of(func: Any) -> str:
    owner = getattr(func, "__self__", None)  # Of an attribute, whose function is its getter.
    return str(getattr(owner, "__name__", None) or getattr(func, "__name__", func))


def _asked(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Answer what an entry is like."""
    entry = args[0]
    if entry._value is not None:
        return func(entry._value, *args[1:], **kwargs)
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def _asked_for_device(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    entry = args[0]
    if entry._value is not None:
        return func(entry._value)
    device: torch.device = entry._device
    if func == _DEVICE:
        return device
    if func is Tensor.get_device:
        return -1 if device.index is None else device.index
    return func == getattr(Tensor, f"is_{device.type}").__get__


def _shown(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    entry = args[0]
    if entry._value is not None:
        return NotImplemented
    assert entry._mark is not None
    return f"{entry._mark.name}(not read, shape={tuple(entry.shape)}, dtype={entry.dtype})"


def _moved(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Move or cast an entry."""
    entry = args[0]
    if not isinstance(entry, BatchEntry) or (mark := entry.mark()) is None:
        return NotImplemented
    if entry._value is not None:
        value = func(entry._value, *map(plain, args[1:]), **kwargs)
        if not isinstance(value, Tensor):  # `type()` without a dtype asks for its name.
            return value
        if value is entry._value:
            return entry
        return _narrowed(entry, BatchEntry.read(mark, value, entry._memory), value)
    device, dtype = _target(entry, func, args[1:], kwargs)
    if not dtype.is_floating_point:
        return NotImplemented
    moved = BatchEntry.unread(mark, entry.shape[1:], dtype, device)
    return _narrowed(entry, moved, NotImplemented)


def _narrowed(entry: BatchEntry, moved: BatchEntry, plainly: Any) -> Any:
    """Return a moved entry; in its place `plainly`, where its numbers were rounded on the way."""
    changes = moved.dtype != entry.dtype
    if changes and entry._is_narrowed:
        return plainly
    moved._is_narrowed = entry._is_narrowed or (
        changes and moved.element_size() < entry.element_size()
    )
    return moved


def _target(
    entry: BatchEntry, func: Any, args: Sequence[Any], kwargs: Any
) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype that an entry has behind such a call."""
    device, dtype = entry._device, entry.dtype
    if func is Tensor.cpu:
        return torch.device("cpu"), dtype
    if func is Tensor.cuda:
        asked = kwargs.get("device", args[0] if args else None)
        return torch.device("cuda", torch.cuda.current_device() if asked is None else asked), dtype
    if func is Tensor.type:
        return device, args[0] if args and isinstance(args[0], torch.dtype) else torch.bool
    if func is not Tensor.to:
        return device, _CASTS.get(func, dtype)
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor):
        return other.device, other.dtype
    known = {name: value for name, value in kwargs.items() if name != "copy"}
    to_device, to_dtype, *_ = torch._C._nn._parse_to(*args, **known)
    return to_device or device, to_dtype or dtype


def _noted(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Have a stream note that it uses an entry: there is no memory to keep."""
    return NotImplemented if args[0]._value is not None else None


def _rows_taken(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Take some of an entry's rows, as one entry or as several."""
    entry = args[0]
    if not isinstance(entry, BatchEntry) or (mark := entry.mark()) is None or mark.is_bundle:
        return NotImplemented
    if not _takes_rows(func, args, kwargs):
        return NotImplemented
    on_host = [a.cpu() if isinstance(a, Tensor) else a for a in map(plain, args[1:])]
    own = {name: a.cpu() if isinstance(a, Tensor) else a for name, a in kwargs.items()}
    if func is Tensor.__getitem__ and isinstance(on_host[0], tuple):
        on_host[0] = on_host[0][0]  # What follows is whole.
    tables = func(mark.table, *on_host, **own)
    marks = tree_map_only(Tensor, lambda table: replace(mark, table=table), tables)
    if entry._value is None:
        parts: Any = tree_map_only(
            Mark,
            lambda m: BatchEntry.unread(m, entry.shape[1:], entry.dtype, entry._device),
            marks,
        )
        return parts
    values = func(entry._value, *map(plain, args[1:]), **kwargs)
    if isinstance(values, Tensor):
        return BatchEntry.read(marks, values, entry._memory)
    return type(values)(
        BatchEntry.read(one, value, entry._memory)
        for one, value in zip(marks, values, strict=True)
    )


def _takes_rows(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether whole rows are taken, along dimension 0."""
    if func is Tensor.__getitem__:
        index = args[1]
        first, *rest = index if isinstance(index, tuple) else (index,)
        if first is Ellipsis or (isinstance(index, tuple) and not index):
            return False
        takes = isinstance(first, (slice, list)) or (isinstance(first, Tensor) and first.ndim == 1)
        return takes and all(one is Ellipsis or one == slice(None) for one in rest)
    place, default = _DIMENSIONS[func]
    dim = kwargs.get("dim", args[place] if len(args) > place else default)
    return bool(dim == 0)  # A negative one is another one of the table of rows.


def _joined(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Join entries along their rows."""
    entries = args[0] if args else kwargs.get("tensors")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if dim != 0 or not all(isinstance(one, BatchEntry) for one in entries) or "out" in kwargs:
        return NotImplemented
    marks = [one.mark() for one in entries]
    if len({mark and mark.name for mark in marks}) != 1 or marks[0] is None or marks[0].is_bundle:
        return NotImplemented
    if len({bool(mark.batches) for mark in marks}) != 1:  # The first batch may have no rows yet.
        return NotImplemented
    batches = {number: batch for mark in marks for number, batch in mark.batches.items()}
    mark = Mark(marks[0].name, batches, torch.cat([mark.table for mark in marks]))
    values = [one._value for one in entries]
    if all(value is not None for value in values):
        return BatchEntry.read(mark, func(values, dim=0))
    like = entries[0]
    alike = {(one.shape[1:], one.dtype, one._device) for one in entries}
    if len(alike) > 1 or any(value is not None for value in values):
        return NotImplemented
    return _unread_like(like, mark)


def _unread_like(entry: BatchEntry, mark: Mark) -> BatchEntry:
    return BatchEntry.unread(mark, entry.shape[1:], entry.dtype, entry._device)


_DEVICE: Any = Tensor.device.__get__
_CASTS = {
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.long: torch.int64,
    Tensor.int: torch.int32,
}
_DIMENSIONS = {
    function: (place, default)
    for name, place, default in (
        ("chunk", 2, 0),
        ("split", 2, 0),
        ("tensor_split", 2, 0),
        ("narrow", 1, None),
        ("index_select", 1, None),
        ("repeat_interleave", 2, None),
    )  # fmt: skip
    for function in (getattr(Tensor, name), getattr(torch, name))
}
"""Where functions that take rows have their dimension, and what it is by default."""

_DATA: Any = vars(torch._C.TensorBase)["data"]
_EXPOSING = {
    Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.untyped_storage,
    Tensor.storage, Tensor.share_memory_, Tensor.apply_, Tensor.map_, Tensor.set_,
    Tensor.resize_, _DATA.__get__, _DATA.__set__, torch.utils.dlpack.to_dlpack,
    Tensor.__reduce_ex__,
}  # fmt: skip
"""Functions that hand out the memory of values, or change it without a version."""


def _rules() -> dict[Any, Callable[[Any, Sequence[Any], Any], Any]]:
    asked = [
        *(getattr(Tensor, name).__get__ for name in (
            "shape", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "itemsize", "nbytes",
            "is_sparse", "is_quantized", "is_nested", "grad", "grad_fn",
        )),
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__,
        Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex,
        Tensor.element_size, Tensor.stride, Tensor.is_contiguous, torch.numel,
    ]  # fmt: skip
    of_device = [
        _DEVICE, Tensor.get_device,
        *(getattr(Tensor, f"is_{kind}").__get__ for kind in ("cpu", "cuda", "meta")),
    ]  # fmt: skip
    moved = [
        Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.pin_memory, Tensor.contiguous, Tensor.detach,
        torch.detach, Tensor.clone, torch.clone, Tensor.type, *_CASTS,
    ]  # fmt: skip
    return {
        **dict.fromkeys(asked, _asked),
        **dict.fromkeys(of_device, _asked_for_device),
        **dict.fromkeys(moved, _moved),
        **dict.fromkeys([Tensor.__getitem__, *_DIMENSIONS], _rows_taken),
        **dict.fromkeys([torch.cat, torch.concat, torch.concatenate], _joined),
        Tensor.record_stream: _noted,
        Tensor.__repr__: _shown,
        Tensor.__format__: _shown,
    }


_RULES = _rules()

"""Stand in for a GPU on a machine without one: count what would wait for it, and what it is given.

A tensor "on the GPU" is a wrapper around one in host memory, which says that its device is cuda:0.
Operations on it run on the host, at once, and are counted. Whatever would make a program wait for
a real GPU (a value read, an unpinned or blocking copy to the host) is counted as a wait, with the
line of ours that asked for it. Streams and events have no effect.

A CUDA graph is captured as on a GPU: nothing that runs meanwhile has an effect, and what would
wait raises. A replay runs the same operations on the same memory. Before it all memory of its own
holds NaN, and that of its pool's later graphs. So does other memory that nobody holds any more.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipetransformer.model.modules import held_values

CUDA = torch.device("cuda", 0)


_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item", "masked_select"}
"""Operations whose result the host needs before it can go on."""


_FREE = {"detach", "view", "t", "transpose", "split", "split_with_sizes", "slice", "select",
         "unsqueeze", "squeeze", "expand", "permute", "as_strided", "_unsafe_view", "alias",
         "narrow", "unbind", "empty", "empty_like", "empty_strided", "new_empty",
         "_reshape_alias", "lift_fresh", "diagonal", "unfold"}  # fmt: skip
"""Operations that launch nothing: they make views, or reserve memory."""


_MIXES = {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_",
          "_unsafe_index"}  # fmt: skip
"""Operations that take tensors of the host beside the GPU's: copies, and indices."""


class StandInGpu:
    """Count what a GPU would have been given.

    Attributes:
        launches: operations that would launch something, by name, since `reset`.
        waits: operations for which the main thread would wait for the GPU, with the line that
            asked, since `reset`.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.captured: StandInGraph | None = None
        self.pools: dict[Any, weakref.WeakSet[StandInGraph]] = {}

    def reset(self) -> None:
        self.launches.clear()
        self.waits.clear()

    def note_wait(self, what: str) -> None:
        """Count a wait of the main thread, under the last lines of ours that led to it."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self.captured is not None:
            self.captured.is_broken = True
            raise RuntimeError(f"CUDA error: {what}: operation not permitted during a capture")
        # Not traceback.extract_stack, which opens each frame's file.
        places = (
            f"{Path(frame.f_code.co_filename).name}:{line}"
            for frame, line in traceback.walk_stack(sys._getframe())
            if "/site-packages/" not in frame.f_code.co_filename
            and __file__ != frame.f_code.co_filename
        )
        self.waits[f"{what} at {' <- '.join(itertools.islice(places, 3))}"] += 1


class OnGpu(Tensor):
    """Wrap a host's tensor as one on the GPU."""

    gpu: ClassVar[StandInGpu]
    __slots__ = ("host", "is_away")  # Not among what is noted on a tensor, which others copy.

    @staticmethod
    def __new__(cls, host: Tensor) -> OnGpu:
        wrapper: OnGpu = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="cpu",
        )
        return wrapper

    def __init__(self, host: Tensor) -> None:
        self.host, self.is_away = host, False

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu") if self.is_away else CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.is_away

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return OnGpu(self.host)

    @data.setter
    def data(self, value: Tensor) -> None:
        # One that leaves the GPU stays what it is, and says that it is on the host.
        self.is_away = not isinstance(value, OnGpu)
        self.host = _host(value)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def record_stream(self, stream: Any) -> None:
        """Have nothing to note."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # `_Functions` sees them all.

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        host: Tensor = tensor.host.clone()
        return host

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return OnGpu(gradient)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the host's tensors, and wrap what it returns."""
    name, gpu = func.overloadpacket.__name__, OnGpu.gpu
    if name not in _MIXES:
        _refuse_mixed(func, args)
    if name in _READS:
        gpu.note_wait(name)
    if name not in _FREE:
        gpu.launches[name] += 1
    if name not in ("copy_", "_to_copy") and any(_waits_for(one, name) for one in args):
        gpu.note_wait(f"{name} with a tensor of the host")
    own = {k: torch.device("cpu") if k == "device" else _host(v) for k, v in kwargs.items()}
    own.pop("pin_memory", None)
    graph = gpu.captured
    result = _drawing(func, _host(args), own) if graph is None else graph.record(func, args, own)
    if func._schema.is_mutable and (kept := _written_into(func, args, kwargs, result)) is not None:
        return kept[0]
    if name == "_local_scalar_dense":
        return result
    return _wrapped(result)


def _drawing(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the host, with the GPU's random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs)
    generator, before = torch.cuda.default_generators[0], torch.get_rng_state()
    torch.set_rng_state(generator.drawn_state())
    try:
        return func(*args, **kwargs)
    finally:
        generator.draw_on(torch.get_rng_state())
        torch.set_rng_state(before)


class _Generator:
    """Stand in for a GPU's generator of random numbers."""

    def __init__(self) -> None:
        self._own = torch.Generator()
        self.is_captured = False

    def manual_seed(self, seed: int) -> None:
        if OnGpu.gpu.captured is not None and seed != self._own.initial_seed():
            OnGpu.gpu.captured.is_broken = True
            raise RuntimeError("a seed can be set during a capture only if it is the same")
        self._own.manual_seed(seed)

    def get_state(self) -> Tensor:
        return self._own.get_state()

    def drawn_state(self) -> Tensor:
        """Return the state to draw from; refused behind a capture that has failed."""
        if self.is_captured and OnGpu.gpu.captured is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        return self._own.get_state()

    def draw_on(self, state: Tensor) -> None:
        self._own.set_state(state)

    def set_state(self, state: Tensor) -> None:
        if OnGpu.gpu.captured is not None and not torch.equal(state, self.get_state()):
            OnGpu.gpu.captured.is_broken = True
            raise RuntimeError("another seed cannot be set during a capture")
        self._own.set_state(state)

    def clone_state(self) -> _Generator:
        other = _Generator()
        other.set_state(self.get_state())
        return other

    def graphsafe_set_state(self, other: _Generator) -> None:
        self._own, self.is_captured = other._own, False


def _tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, (list, tuple)):
        return [one for value in values for one in _tensors_in(value)]
    return [values] if isinstance(values, Tensor) else []


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoil(storage: torch.UntypedStorage) -> None:
    """Fill memory with what is NaN in every floating dtype."""
    torch.tensor([], dtype=torch.uint8).set_(storage).fill_(0xFF)


class StandInGraph:
    """Stand in for torch.cuda.CUDAGraph: record operations, undo what they did, repeat them."""

    def __init__(self) -> None:
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._own: dict[int, torch.UntypedStorage] = {}
        self._number = 0
        self._pool: weakref.WeakSet[StandInGraph] = weakref.WeakSet()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._others: dict[int, tuple[torch.UntypedStorage, list[Any]]] = {}
        self.is_broken = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        gpu = OnGpu.gpu
        assert gpu.captured is None, "one capture at a time"
        if len(gpu.pools.get(pool, [self])) == 0:  # As torch does for a pool's handle.
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: the pool's graphs are gone")
        self._pool = gpu.pools.setdefault(pool, weakref.WeakSet())
        self._number = max((one._number for one in self._pool), default=0) + 1
        self._pool.add(self)
        generator = torch.cuda.default_generators[0]
        self._drawn, generator.is_captured = generator.get_state(), True
        gpu.captured = self

    def capture_end(self) -> None:
        gpu, generator = OnGpu.gpu, torch.cuda.default_generators[0]
        gpu.captured = None
        for storage, before in self._before.values():
            storage.copy_(before)
        for one in (one for *_, made in self._operations for one in made):
            if one.is_floating_point():  # Nothing has been computed; others are places, perhaps.
                _spoil(one.untyped_storage())
        generator.set_state(self._drawn)
        assert self._operations or self.is_broken, "torch warns of an empty graph"
        if self.is_broken:  # As torch does: the generator stays as it is.
            raise RuntimeError("CUDA error: operation failed due to a previous error in a capture")
        generator.is_captured = False

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation whose effects the end of the capture undoes."""
        others = [one for one in _tensors_in([*args]) if isinstance(one, OnGpu)]
        args = [_kept(one) for one in args]
        given = _tensors_in([*args, *kwargs.values()])
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in _tensors_in(value):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in {**self._own, **self._before}:
                        self._before[storage.data_ptr()] = storage, storage.clone()
        for one in others:
            if _memory(one.host) not in self._own:
                storage = one.host.untyped_storage()
                self._others.setdefault(_memory(one.host), (storage, []))[1].append(
                    weakref.ref(one)
                )
        result = _drawing(func, args, kwargs)
        known = {_memory(one) for one in given}
        made = [one for one in _tensors_in(result) if _memory(one) not in known]
        self._own |= {_memory(one): one.untyped_storage() for one in made}
        if func.overloadpacket.__name__ not in _FREE:
            self._operations.append((func, args, kwargs, made))
        return result

    def replay(self) -> None:
        """Repeat the operations, on the memory they were captured with."""
        OnGpu.gpu.launches["graph"] += 1
        others = [one for one in self._pool if one is not self]
        for memory, (storage, holders) in self._others.items():
            # Graphs of a pool follow one another.
            of_pool = any(memory in one._own for one in others)
            if not of_pool and not _is_held(memory, holders):
                _spoil(storage)
        # What was captured later may lie where this graph has left memory, also if it is held.
        for graph in (self, *(one for one in others if one._number > self._number)):
            for storage in graph._own.values():
                _spoil(storage)
        for func, args, kwargs, made in self._operations:
            known = {_memory(one) for one in _tensors_in([*args, *kwargs.values()])}
            result = _drawing(func, args, kwargs)
            again = [one for one in _tensors_in(result) if _memory(one) not in known]
            for into, value in zip(made, again, strict=True):
                into.copy_(value)


def _is_held(memory: int, holders: list[Any]) -> bool:
    """Say whether a tensor there still lives: one of those that were seen, or any other."""
    if any(one() is not None for one in holders):
        return True
    return any(type(one) is OnGpu and _memory(one.host) == memory for one in gc.get_objects())


def _kept(value: Any) -> Any:
    """Return an operation's argument as a kernel keeps it: a number of the host's by its value."""
    if isinstance(value, (list, tuple)):
        return type(value)([_kept(one) for one in value])
    on_host = isinstance(value, Tensor) and not isinstance(value, OnGpu)
    return value.clone() if on_host else _host(value)


def _written_into(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Any] | None:
    """Return what an operation that writes returns, if that is not a tensor of its own."""
    name, into = func.overloadpacket.__name__, args[0] if args else None
    if name == "copy_":
        is_late = (len(args) > 2 and args[2]) or kwargs.get("non_blocking")
        if isinstance(args[1], OnGpu) and not isinstance(into, OnGpu):
            if not is_late:
                OnGpu.gpu.note_wait(name)
            return (into,)
        if isinstance(into, OnGpu) and not isinstance(args[1], OnGpu):
            _note_upload(args[1], is_late)
    # As it was given: autograd knows a tensor by its wrapper.
    if not func._schema.returns:
        return (None,)
    is_given = isinstance(into, Tensor) and isinstance(result, Tensor) and result is _host(into)
    return (into,) if is_given else None


def _waits_for(argument: Any, name: str) -> bool:
    """Say whether an argument would be copied to the GPU first: an index, a number of `where`."""
    if isinstance(argument, (list, tuple)):
        return any(_waits_for(one, name) for one in argument)
    on_host = isinstance(argument, Tensor) and not isinstance(argument, OnGpu)
    return on_host and (argument.ndim > 0 or name == "where")


def _refuse_mixed(func: Any, args: Any) -> None:
    """Raise as CUDA does for tensors of the host among the GPU's; single numbers may be there."""
    leaves = [
        one for value in args for one in (value if isinstance(value, (list, tuple)) else [value])
    ]
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    on_gpu = [isinstance(one, OnGpu) and not one.is_away for one in tensors]
    if any(on_gpu) and any(
        not there and one.ndim for there, one in zip(on_gpu, tensors, strict=True)
    ):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and cpu! (when {func} was called)"
        )


# An operation's arguments and results are tensors, and lists and tuples of them. Torch's own
# `tree_map` knows more, and takes longer than all operations.
def _host(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_host(one) for one in value])
    return value.host if isinstance(value, OnGpu) else value


def _wrapped(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_wrapped(one) for one in value])
    return OnGpu(value) if isinstance(value, Tensor) and not isinstance(value, OnGpu) else value


def _note_upload(source: Tensor, is_late: Any) -> None:
    """Count a copy from the host, which waits unless it is pinned and asked not to."""
    if not is_late or not _is_pinned(source):
        OnGpu.gpu.note_wait("upload")


class _Operations(TorchDispatchMode):
    """Have what is made on the GPU, or moved there, wrapped."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        to_gpu = device is not None and torch.device(device).type == "cuda"
        if to_gpu and func.overloadpacket.__name__ == "_to_copy":
            if not isinstance(args[0], OnGpu):
                _note_upload(args[0], kwargs.get("non_blocking"))
        if to_gpu or any(issubclass(kind, OnGpu) for kind in types):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


_PINNED = "_stand_in_pinned"


def _is_pinned(tensor: Tensor) -> bool:
    # Of the memory: views of another dtype know no base.
    return getattr(tensor.untyped_storage(), _PINNED, False)


_KNOWN = (Tensor, torch.nn.Parameter, OnGpu)


class _Functions(TorchFunctionMode):
    """Answer what torch asks the real device for."""

    def __torch_function__(  # noqa: C901 - what torch asks is a list
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(first, Tensor) and type(first) not in _KNOWN:
            with self:  # It answers by itself, for which it asks again.
                return type(first).__torch_function__(func, types, args, kwargs)
        if name == "is_pinned" and isinstance(first, Tensor):
            return _is_pinned(first)
        if name == "pin_memory" and isinstance(first, Tensor):
            pinned = first.clone()
            setattr(pinned.untyped_storage(), _PINNED, True)
            return pinned
        if name in ("to", "cpu") and isinstance(first, OnGpu):
            wanted = "cpu" if name == "cpu" else _device_of(args[1:], kwargs)
            if first.is_away and wanted == CUDA:
                OnGpu.gpu.note_wait("upload")
                return OnGpu(first.host)
            if wanted is not None and torch.device(wanted).type == "cpu":
                if not kwargs.get("non_blocking") and not first.is_away:
                    OnGpu.gpu.note_wait("copy to the host")
                dtypes = [one for one in (*args[1:], *kwargs.values()) if _is_dtype(one)]
                host: Tensor = _ToHost.apply(first)
                return host.to(dtypes[0]) if dtypes else host
        if name == "tolist" and isinstance(first, OnGpu):
            OnGpu.gpu.note_wait(name)
            return first.host.tolist()
        if func in (torch.tensor, torch.as_tensor) and _is_for_gpu(first, kwargs):
            return _made_there(func(*args, **{**kwargs, "device": "cpu"}))
        pins = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if pins and isinstance(result, Tensor):
            setattr(result.untyped_storage(), _PINNED, True)
        return result


def _is_for_gpu(values: Any, kwargs: Any) -> bool:
    device = kwargs.get("device")
    is_there = isinstance(values, OnGpu)
    return device is not None and torch.device(device).type == "cuda" and not is_there


def _made_there(host: Tensor) -> OnGpu:
    if host.numel():
        OnGpu.gpu.note_wait("upload")
    return OnGpu(host)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _device_of(args: Any, kwargs: Any) -> Any:
    given = (*args, kwargs.get("device"))
    return next((one for one in given if isinstance(one, (str, torch.device))), None)


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CUDA

    def wait_stream(self, other: Any) -> None:
        """Have nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Have nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        OnGpu.gpu.note_wait("stream")

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return OnGpu.gpu.captured is not None


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.num_recorded = 0

    def record(self, stream: Any = None) -> None:
        self.num_recorded += 1

    def wait(self, stream: Any = None) -> None:
        """Have nothing to wait for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Wait for what was recorded, and not for all that the GPU was given."""

    def elapsed_time(self, end: Any) -> float:
        return 0.0


_FREE_BYTES = 8 << 30


def put_on_gpu(model: torch.nn.Module) -> None:
    """Give a model parameters and buffers there; within `stand_in_gpu`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = torch.nn.Parameter(parameter.detach().to(CUDA), parameter.requires_grad)
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(CUDA)


@contextlib.contextmanager
def stand_in_gpu() -> Iterator[StandInGpu]:
    """Have torch see one GPU meanwhile."""
    gpu = OnGpu.gpu = StandInGpu()
    stream, generator, handles = _Stream(), _Generator(), itertools.count(1)

    def synchronize(device: Any = None) -> None:
        gpu.note_wait("device")

    def stream_of(device: Any = None) -> _Stream:
        return stream

    changes = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "is_initialized": lambda: True,
        "_initialized": True,
        "_lazy_init": lambda: None,
        "mem_get_info": lambda device=None: (_FREE_BYTES, _FREE_BYTES),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_tf32_supported": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "stand-in",
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "default_generators": (generator,),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "CUDAGraph": StandInGraph,
        "graph_pool_handle": lambda: (0, next(handles)),
        "is_current_stream_capturing": lambda: gpu.captured is not None,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda one: contextlib.nullcontext(),
        "device": lambda one: contextlib.nullcontext(),
        "synchronize": synchronize,
    }
    grouped = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def grouped_there(tensors: Any, with_indices: bool = False) -> Any:
        """Name the device that tensors say they are on; torch's own function looks beneath."""
        return {
            (CUDA if isinstance(group[0][0], OnGpu) else device, dtype): (group, indices)
            for (device, dtype), (group, indices) in grouped(tensors, with_indices).items()
        }

    submit = ThreadPoolExecutor.submit

    def submit_there(self: Any, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Have a thread's work see the GPU, too: torch's modes are a thread's own."""

        def wrapped() -> Any:
            with _Functions(), _Operations():
                return work(*args, **kwargs)

        return submit(self, wrapped)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", submit_there))
        stack.enter_context(
            mock.patch.object(
                torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", grouped_there
            )
        )
        for name, change in changes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, change))
        # What it wraps moves and is read as a GPU's tensors are.
        plain = {*held_values._PLAIN, OnGpu}
        stack.enter_context(mock.patch.object(held_values, "_PLAIN", plain))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", stream_of))
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())
        yield gpu


class MarkedStream:
    """Take the place of torch.cuda's devices and events.

    Attributes:
        current: the current device's index.
        calls: what events were asked, and on which device.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, device: int) -> None:
        self.current, self.calls = device, list[str]()
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "current_stream", lambda: self)
        patch.setattr(torch.cuda, "device", self._on)

    def record_event(self) -> MarkedStream:
        return self

    def query(self) -> bool:
        self.calls.append(f"query on {self.current}")
        return True

    def synchronize(self) -> None:
        self.calls.append(f"synchronize on {self.current}")

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

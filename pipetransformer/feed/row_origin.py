"""Say what kept rows are made from, so that a later run reads none that it would not make itself.

what decides a row's numbers             where it is said
weights and buffers of frozen layers     stamp: `autocache.chain_hash`
code and settings of their modules       stamp: `settings_of`
data, and what is done to a sample       `data_origin`, and the digest in each row
device, threads, chunk, torch            `machine_origin`

What this misses, such as a changed function of another file that a module calls, is found
otherwise: some rows are computed again before the first is read, see `row_proof`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from importlib import metadata
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autocache import RowContent, chain_hash
from pipetransformer.config import TrainConfig
from pipetransformer.feed.samples import Samples
from pipetransformer.model import LayeredModel

_MOST_DIGESTED = 16
"""Samples, from all over the data set, whose digests tell it from another."""

_HEADS_OWN = frozenset({
    "_name_or_path", "architectures", "dtype", "finetuning_task", "id2label", "label2id",
    "num_labels", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
    "task_specific_params", "transformers_version", "use_cache",
})  # fmt: skip
"""Settings of transformers' models that change nothing below the head."""

_IDLE = frozenset({
    "_gradient_checkpointing_func", "config", "generation_config", "gradient_checkpointing",
    "name_or_path", "training", "warnings_issued",
})  # fmt: skip
"""Attributes of modules that change no number, or are looked at elsewhere."""

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_is_hf_initialized"})

_LIBRARIES = ("diffusers", "numpy", "peft", "timm", "torch", "torchvision", "transformers")

_MOST_LEVELS = 6
"""How deep values within values are looked at."""

_CONTAINERS = (list, tuple, set, frozenset, dict)

_SILENT = (logging.Logger, random.Random, np.random.Generator, torch.Generator)
"""What decides no number: blocks that draw are not cached."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, torch.device)


def data_origin(
    samples: Samples, content: RowContent, config: TrainConfig, *, num_views: int
) -> dict[str, Any]:
    """Return what tells a data set's samples from those of most others.

    Each row is compared with its sample, too, when a run first reads it. No fingerprint that a
    library gives stands for that: it may know of a file no more than its path and time.
    """
    return {
        "samples": len(samples.dataset),
        "digests": [
            int(content.digests(samples.probe([i]))) for i in samples.spread(_MOST_DIGESTED)
        ],
        "named": config.cache_fingerprint,
        "collate": _spell(samples.collation.function),
        # Fixed views are random numbers of this seed.
        "views": [num_views, config.seed] if num_views > 1 else None,
    }


def machine_origin(device: torch.device, *, chunk_size: int) -> dict[str, Any]:
    """Return what decides a number's last bits, beside the layers."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "device": f"{device.type}, {where}",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "chunk": chunk_size,
        "torch": torch.__version__,
        "matmul": torch.get_float32_matmul_precision(),
    }


def settings_of(model: LayeredModel) -> list[str]:
    """Return, for each layer, a hash of the code and the settings of the modules that compute it.

    Modules around several layers count to the first; a model that only adds a head does not.
    """
    digests = [hashlib.blake2b(digest_size=16) for _ in range(model.num_layers + 1)]
    layers = _layers_by_path(model)
    for path, module in model.model.named_modules():
        if path or getattr(module, "base_model", module) is module:
            facts = path, _settings(module), _code_of(module)
            digests[layers[path]].update(repr(facts).encode())
        elif not _is_of_library(type(module)):  # Whoever adds a head may change what is below it.
            digests[layers[path]].update(_code_of(module).encode())
    config: Any = getattr(model.model, "config", None)
    if isinstance(getattr(config, "to_dict", None), MethodType):
        own = {name: part for name, part in config.to_dict().items() if name not in _HEADS_OWN}
        attention = getattr(config, "_attn_implementation", None)
        digests[0].update(repr((sorted(own.items()), attention)).encode())
    return [digest.hexdigest() for digest in digests]


def _layers_by_path(model: LayeredModel) -> dict[str, int]:
    """Return the lowest layer that has a tensor in each module, by the module's path.

    Modules without tensors, such as activations, count as the module around them.
    """
    layers: dict[str, int] = {}
    for name, index in model.owners.items():
        path = name
        while path:
            path = path.rpartition(".")[0]
            layers[path] = min(layers.get(path, model.num_layers), model.sublayers[index].layer)
    for path, _ in model.model.named_modules():
        if path not in layers:
            layers[path] = layers.get(path.rpartition(".")[0], 0)
    return layers


def _settings(module: nn.Module) -> list[tuple[str, str]]:
    """Return what a module holds beside its tensors and parts, hooks on its forward included."""
    spelled = []
    for name, value in vars(module).items():
        # A model that is attached to a loop has other forwards, which know the module's own one.
        if type(value).__module__.startswith("pipetransformer."):
            value = getattr(value, "own", None)
        if value is not None and name not in _IDLE and name not in _OF_EVERY_MODULE:
            spelled.append((name, _spell(value)))
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        spelled += [
            ("hook", _spell(hook))
            for hook in hooks.values()
            if not type(hook).__module__.startswith(("freeze.", "pipetransformer."))
        ]
    return sorted(spelled)


def _spell(value: Any, *, most: int = _MOST_LEVELS) -> str:
    """Spell a value: its contents, its code, or, where neither is to be had, its class."""
    if _is_plain(value):
        return repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        return _spell_array(value)
    if isinstance(value, (type, BuiltinFunctionType, ModuleType)):
        return str(getattr(value, "__qualname__", value.__name__))
    if most == 0 or isinstance(value, _SILENT):
        return type(value).__qualname__
    within = partial(_spell, most=most - 1)
    if (parts := _parts_of_code(value)) is not None:
        return f"{[*map(within, parts)]}"
    content = _spell_content(value, within)
    if type(value) in _CONTAINERS:
        return content
    held = _attributes_of(value)
    if not held and not hasattr(value, "__dict__"):
        return f"{type(value).__qualname__} {[*map(within, _parts_of_state(value))]}"
    own = sorted((name, within(part)) for name, part in held.items() if _is_setting(name, part))
    return f"{_code_of(value, most=most - 1)} {own} {content}"


def _spell_content(value: Any, within: Callable[[Any], str]) -> str:
    """Spell what a container holds; "" of what is none."""
    if isinstance(value, (list, tuple)):
        return f"{[*map(within, value)]}"
    if isinstance(value, (set, frozenset)):
        return f"{{{sorted(map(within, value))}}}"
    if isinstance(value, dict):
        return f"{sorted((within(key), within(part)) for key, part in value.items())}"
    return ""


def _parts_of_state(value: Any) -> list[Any]:
    """Return what is needed to copy an object that holds no attributes; [] where it cannot be."""
    try:
        parts = value.__reduce_ex__(4)
    except Exception:  # Whatever it raises says no more than that.
        return []
    return [[*part] if isinstance(part, Iterator) else part for part in parts]


def _spell_array(value: Tensor | np.ndarray) -> str:
    if isinstance(value, Tensor):
        return f"{chain_hash(0, [('', value)], mode='')}"
    data = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
    return f"{value.dtype} {value.shape} {_hashed(data)}"


def _attributes_of(value: object) -> dict[str, Any]:
    """Return what an object holds, in slots, too."""
    slots = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
    return {n: getattr(value, n) for n in slots if hasattr(value, n)} | getattr(
        value, "__dict__", {}
    )


def _is_setting(name: str, value: object) -> bool:
    """Return whether an attribute is a setting; a private one may lead to anything."""
    is_public = name[0] != "_" or name == "__wrapped__"  # The function that a decorator took.
    return is_public or isinstance(value, (np.ndarray, Tensor, set, frozenset)) or _is_plain(value)


def _parts_of_code(value: Any) -> list[Any] | None:
    """Return what a function consists of, and what it has captured; None for what is none."""
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        defaults = [value.__defaults__, value.__kwdefaults__]
        return [value.__code__, cells, defaults, _globals_of(value)]
    if isinstance(value, CodeType):
        return [value.co_name, value.co_code, value.co_names, value.co_consts]
    return None


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(part) for pair in value.items() for part in pair)
    return isinstance(value, _PLAIN)


def _code_of(value: object, *, most: int = _MOST_LEVELS) -> str:
    """Spell the class of an object, and those of the user's that it inherits from."""
    first, *others = type(value).__mro__
    spelled = [first, *(kind for kind in others if not _is_of_library(kind))]
    return " ".join(_code_of_class(kind, most) for kind in spelled)


def _is_of_library(kind: type) -> bool:
    """Return whether a class's code is told by the version of its package."""
    return kind.__module__.partition(".")[0] in ("builtins", "abc", "typing", *_LIBRARIES)


def _code_of_class(kind: Any, most: int) -> str:
    """Return a class's name, its package's version, and a hash of its functions and settings.

    As they are now: a library may have exchanged some since its source was read.
    """
    own = [(name, _function_of(value)) for name, value in sorted(vars(kind).items())]
    spelled = [
        (name, _spell(value, most=most))
        for name, value in own
        if isinstance(value, FunctionType)
        or (name[:2] != "__" and (_is_plain(value) or hasattr(value, "__wrapped__")))
    ]
    version = _version_of(kind.__module__.partition(".")[0])
    return f"{kind.__module__}.{kind.__qualname__} {version} {_hashed(repr(spelled).encode())}"


def _function_of(value: Any) -> Any:
    """Return the function beneath a method or property of a class; other values as they are."""
    if isinstance(value, (property, cached_property)):
        return value.fget if isinstance(value, property) else value.func
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


def _globals_of(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the constants and functions of its module that a function names."""
    known = function.__globals__
    names = sorted({name for name in _names_in(function.__code__) if name[:2] != "__"})
    found = [(name, known[name]) for name in names if name in known]
    # A list is left out: forwards note in it what they were given, and it grows.
    return [
        (name, value)
        for name, value in found
        if isinstance(value, FunctionType) or (_is_plain(value) and not isinstance(value, list))
    ]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


@cache
def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _hashed(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def about_rows(model: LayeredModel, depth: int, num_samples: int) -> dict[str, Any]:
    """Return what a person wants to know of rows; it decides nothing."""
    return {
        "model": type(model.model).__name__,
        "layers": depth,
        "samples": num_samples,
        "made_by": os.path.basename(sys.argv[0]),
    }

"""Build a model from a name on the command line, with a sample that it takes."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.extras import require
from pipetransformer.feed import Batch
from pipetransformer.model import LayeredModel, adapt

BERTS: dict[str, dict[str, Any]] = {
    "bert-base": {},
    "bert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
"""Names of transformers' BERT for question answering, and what differs from its defaults."""
WEIGHT_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class ModelChoice:
    """Name a model and what it is fed with.

    Args:
        name: a timm VisionTransformer, one of BERTS, or "module:function". The function returns a
            model (for `adapt`) and a sample batch: inputs and targets by name.
        image_size: pixels of a side, for timm; None is the model's own.
        seq_length: tokens of a sample, for BERT.
        dtype: of parameters and computations; one of WEIGHT_DTYPES.
    Raises:
        ValueError: a value is out of range, or does not apply to the model.
    """

    name: str
    image_size: int | None = None
    seq_length: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for option, value, applies in (
            ("image_size", self.image_size, self.name not in BERTS and not self.is_own),
            ("seq_length", self.seq_length, self.name in BERTS),
        ):
            if value is not None and not applies:
                raise ValueError(f"{option} does not apply to {self.name}; leave it out")
            if value is not None and value < 1:
                raise ValueError(f"{option} is {value}; give at least 1")

    @property
    def is_own(self) -> bool:
        """Tell whether the user's function builds the model."""
        return ":" in self.name


@dataclass(frozen=True)
class NamedModel:
    """Hold a model with one sample's inputs and targets, (1, ...) tensors."""

    model: LayeredModel
    sample: Batch

    def batch(self, size: int) -> Batch:
        return {
            name: tensor.expand(size, *tensor.shape[1:]).contiguous()
            for name, tensor in self.sample.items()
        }


def build_named(choice: ModelChoice, *, device: str) -> NamedModel:
    """Build the model, with random weights, and its sample.

    Args:
        device: "cpu", or "meta" for shapes without memory.
    Raises:
        ImportError: the package that has the model is not installed.
        ValueError: no model has this name, no adapter knows the model, or there is no sample.
    """
    dtype = WEIGHT_DTYPES[choice.dtype]
    with torch.device(device):
        if choice.is_own:
            model, batch = _build_own(choice.name, device)
        elif choice.name in BERTS:
            model, batch = _build_bert(choice)
        else:
            model, batch = _build_timm(choice)
        try:
            layered = adapt(model)
        except TypeError as error:
            raise ValueError(str(error)) from error
        layered.convert(dtype)
    sample = {
        name: tensor[:1].to(device, dtype if tensor.is_floating_point() else None)
        for name, tensor in batch.items()
    }
    return NamedModel(layered, sample)


def _build_timm(choice: ModelChoice) -> tuple[nn.Module, Batch]:
    require("timm", purpose=f"the model {choice.name}")
    # timm takes seconds to import, and only its own models need it.
    import timm

    if not timm.is_model(choice.name):
        # vit_relpos_* and the like are other classes. The adapter knows no parallel blocks.
        parallel = ["*_xp_*", "*pwee_*", "*x2_*"]
        known = timm.list_models("vit_*", "vision_transformer", exclude_filters=parallel)
        near = difflib.get_close_matches(choice.name, known) or ["vit_base_patch16_224"]
        raise ValueError(
            f"no model is called {choice.name!r}; give {', '.join(BERTS)}, a VisionTransformer of "
            f'timm (such as {", ".join(near)}), or "module:function" for your own'
        )
    own = choice.image_size
    options: dict[str, Any] = {} if own is None else {"img_size": own}
    model: Any = timm.create_model(choice.name, **options)
    channels, *sides = model.default_cfg["input_size"]
    pixels = torch.zeros(1, channels, *(sides if own is None else (own, own)))
    return model, {"x": pixels, "y": torch.zeros(1, dtype=torch.int64)}


def _build_bert(choice: ModelChoice) -> tuple[nn.Module, Batch]:
    require("transformers", purpose=f"the model {choice.name}")
    # transformers takes seconds to import, and only its own models need it.
    from transformers import BertConfig, BertForQuestionAnswering

    config = BertConfig(**BERTS[choice.name])
    length, most = choice.seq_length or 384, config.max_position_embeddings
    if length > most:
        raise ValueError(f"seq_length is {length}; {choice.name} takes up to {most}")
    tokens = torch.ones(1, length, dtype=torch.int64)
    position = torch.zeros(1, dtype=torch.int64)
    return BertForQuestionAnswering(config), {
        "input_ids": tokens,
        "attention_mask": tokens,
        "start_positions": position,
        "end_positions": position,
    }


def _build_own(name: str, device: str) -> tuple[nn.Module | LayeredModel, Mapping[str, Tensor]]:
    """Call the user's function, whose module may be in the current folder."""
    module_name, _, function_name = name.partition(":")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)  # A console script's path lacks it, unlike that of `python -m`.
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name!r} names a module that cannot be imported: {error}") from error
    finally:
        sys.path.remove(folder)
    function: Any = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}; give module:function")
    try:
        built = function()
    except (RuntimeError, NotImplementedError) as error:
        if device != "meta":
            raise
        raise ValueError(
            f"{name} failed: {error}; for a cluster that is only described it is called under "
            "torch.device('meta'), where tensors have no values: build the model without any"
        ) from error
    match built:
        case (nn.Module() | LayeredModel(), Mapping() as batch) if batch and all(
            isinstance(tensor, Tensor) and tensor.ndim and len(tensor) for tensor in batch.values()
        ):
            return built
    raise ValueError(
        f"{name} returned {type(built).__name__}; it must return (model, batch): a model that "
        "adapt knows, and a batch of at least one sample, tensors by name"
    )

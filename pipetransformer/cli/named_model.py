"""Build a model from a name on the command line, with a sample that it takes."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.cli.configured_model import (
    USUAL_TOKENS,
    Built,
    build_configured,
    cache_folder,
    drawn_images,
    find_config,
)
from pipetransformer.cli.known_integers import KnownIntegers
from pipetransformer.cli.lora import add_lora
from pipetransformer.cli.model_choice import ModelChoice
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
_BERT_TOKENS = 384
WEIGHT_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class NamedModel:
    """Hold a model with one sample's inputs and targets, (1, ...) tensors.

    Args:
        assumed: what the model's name does not say, a sentence each.
        known: the whole numbers among the sample's values, where it is on the meta device.
    """

    model: LayeredModel
    sample: Batch
    assumed: tuple[str, ...] = ()
    known: KnownIntegers = field(default_factory=KnownIntegers)

    def batch(self, size: int) -> Batch:
        return _batch(self.sample, size)

    def know(self, batch: Mapping[str, Tensor]) -> None:
        """Take the whole numbers of a batch on the meta device for copies of the sample's."""
        for name, tensor in batch.items():
            value = self.known.value_of(self.sample[name])
            if value is not None and self.known.value_of(tensor) is None:
                self.known.tell(tensor, value.expand(tensor.shape).contiguous())


def build_named(choice: ModelChoice, *, device: str) -> NamedModel:
    """Build the model, with random weights, and its sample.

    Args:
        device: "cpu", or "meta" for shapes without memory.
    Raises:
        ImportError: the package that has the model is not installed.
        ValueError: no model has this name, it cannot be cut into sublayers, or there is no sample.
    """
    dtype, is_meta, known = WEIGHT_DTYPES[choice.dtype], device == "meta", KnownIntegers()
    with torch.device(device), known if is_meta else nullcontext():
        built = build(choice, device=device)
        if isinstance(built.model, nn.Module):  # Kernels of experts may take one dtype alone.
            built.model.to(dtype)
        sample = {
            name: tensor[:1].to(device, dtype if tensor.is_floating_point() else None)
            for name, tensor in built.batch.items()
        }
        # A described cluster counts no loss: none is looked for where there are no values.
        loss_fn = F.cross_entropy if is_meta else None
        try:
            layered = adapt(built.model, lambda names: _batch(sample, 2), loss_fn=loss_fn)
        except TypeError as error:
            raise ValueError(str(error)) from error
        layered.convert(dtype)
    return NamedModel(layered, sample, built.assumed, known)


def _batch(sample: Mapping[str, Tensor], size: int) -> Batch:
    return {
        name: tensor.expand(size, *tensor.shape[1:]).contiguous()
        for name, tensor in sample.items()
    }


def build(
    choice: ModelChoice,
    *,
    device: str,
    config: Any = None,
    usual_tokens: int = USUAL_TOKENS,
) -> Built:
    """Build the model as its package has it, on the default device; see `build_named`.

    Args:
        config: of transformers, in the place of that which the choice names.
        usual_tokens: of a sample, for texts, where the choice has no seq_length.
    """
    if choice.is_own:
        model, batch = _build_own(choice.name, device)
        return Built(model, batch)
    if config is None:
        config = named_config(choice)
    if config is None:
        choice.refuse("seq_length", "task")
        built = _build_timm(choice)
    else:
        usual_tokens = min(usual_tokens, _BERT_TOKENS) if choice.name in BERTS else usual_tokens
        built = build_configured(config, choice, usual_tokens=usual_tokens)
    if choice.lora is None:
        return built
    assert isinstance(built.model, nn.Module)
    wrapped, sentence = add_lora(built.model, choice.lora, task=built.task, head=built.head)
    return replace(built, model=wrapped, assumed=(*built.assumed, sentence))


def named_config(choice: ModelChoice) -> Any | None:
    """Return a fresh configuration of transformers; None where the name is not of one."""
    if choice.name not in BERTS:
        return None if choice.is_own else find_config(choice.name)
    require("transformers", purpose=f"the model {choice.name}")
    # transformers takes seconds to import, and only its own models need it.
    from transformers import BertConfig

    return BertConfig(**BERTS[choice.name], architectures=["BertForQuestionAnswering"])


def _build_timm(choice: ModelChoice) -> Built:
    require("timm", purpose=f"the model {choice.name}")
    # timm takes seconds to import, and only its own models need it.
    import timm

    if not timm.is_model(choice.name):
        known = timm.list_models()
        near = difflib.get_close_matches(choice.name, known) or ["vit_base_patch16_224"]
        raise ValueError(
            f"no model is called {choice.name!r}; give {', '.join(BERTS)}, a model of timm (such "
            f"as {', '.join(near)}), a folder or file with a configuration of transformers, or "
            '"module:function" for your own. A name of the hub is looked for in its cache alone '
            f"({cache_folder()}), as nothing is downloaded: fetch its config.json there first"
        )
    own = choice.image_size
    options: dict[str, Any] = {} if own is None else {"img_size": own}
    try:
        model: Any = timm.create_model(choice.name, **options)
    except TypeError as error:
        raise ValueError(f"{choice.name} takes no image_size ({error}); leave it out") from error
    channels, *sides = model.default_cfg["input_size"]
    pixels = drawn_images(channels, *(sides if own is None else (own, own)))
    batch = {"x": pixels, "y": torch.zeros(len(pixels), dtype=torch.int64, device="cpu")}
    return Built(model, batch, head=model.default_cfg["classifier"])


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

"""Find the model that a command names; build it with random weights and a sample that it takes.

    bert-base, bert-large            transformers' BERT for question answering
    a folder, config.json, org/name  a configuration of transformers, without its weights
    vit_base_patch16_224             a model of timm
    module:function                  the user's own

Nothing is downloaded: names of the hub are looked for in the cache of transformers.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopipe.cluster import FullMasks
from pipetransformer.cli import samples
from pipetransformer.extras import require
from pipetransformer.feed import Batch
from pipetransformer.model import LayeredModel, adapt, entry_names

_LARGE = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096,
}  # fmt: skip
BERTS: dict[str, dict[str, Any]] = {"bert-base": {}, "bert-large": _LARGE}
"""Names of transformers' BERT, and what differs from its defaults."""
TASKS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "sequence-classification": "SEQUENCE_CLASSIFICATION",
    "token-classification": "TOKEN_CLASSIFICATION",
    "question-answering": "QUESTION_ANSWERING",
    "image-classification": "IMAGE_CLASSIFICATION",
}
"""Tasks as transformers names them in its tables."""
WEIGHT_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
_USUAL_TOKENS, _BERT_TOKENS = 512, 384


@dataclass(frozen=True)
class ModelChoice:
    """Name a model and what it is fed with.

    Args:
        name: as on the command line; see above. The user's function returns a model, for `adapt`,
            and a batch of at least one sample: inputs and targets by name.
        image_size: pixels of a side, for images; None is the model's own.
        seq_length: tokens of a sample, for texts.
        dtype: of parameters and computations; one of WEIGHT_DTYPES.
        task: one of TASKS, for a configuration; None is that of the class which it names.
    Raises:
        ValueError: a value is out of range, or does not apply to the model.
    """

    name: str
    image_size: int | None = None
    seq_length: int | None = None
    dtype: str = "float32"
    task: str | None = None

    def __post_init__(self) -> None:
        for option in ("image_size", "seq_length"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ValueError(f"{option} is {value}; give at least 1")
        if self.task is not None and self.task not in TASKS:
            raise ValueError(f"task is {self.task!r}; give one of {', '.join(TASKS)}")
        if self.is_own:
            self.refuse("image_size", "seq_length", "task")

    @property
    def is_own(self) -> bool:
        """Return whether the user's function builds the model."""
        return ":" in self.name

    def refuse(self, *options: str) -> None:
        """Raise a ValueError for options that were given, and do not apply to the model."""
        for option in options:
            if getattr(self, option) is not None:
                raise ValueError(f"{option} does not apply to {self.name}; leave it out")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        help="a folder or config.json of transformers, a name of the hub that is in its cache, a "
        f"model of timm, {' or '.join(BERTS)}, or module:function",
    )
    add("--image-size", type=int, help="pixels of a side, for images")
    add("--seq-length", type=int, help=f"tokens of a text; {_USUAL_TOKENS} if unsaid")
    add("--task", choices=tuple(TASKS), help="head of a configuration; else the class it names")


def model_choice(options: argparse.Namespace, *, dtype: str = "float32") -> ModelChoice:
    """Return the model that options name; a ValueError as of `ModelChoice`."""
    shape = options.image_size, options.seq_length
    return ModelChoice(options.model, *shape, dtype, options.task)


@dataclass(frozen=True)
class Built:
    """Hold a model as its package builds it.

    Args:
        batch: one sample or more that it takes, with targets, in host memory.
        assumed: what its name does not say, a sentence each.
    """

    model: nn.Module | LayeredModel
    batch: Mapping[str, Tensor]
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedModel:
    """Hold a model in sublayers with one sample's inputs and targets, (1, ...) tensors.

    Args:
        assumed: what the model's name does not say, a sentence each.
        masks: under which its forward runs where it is on the meta device.
    """

    model: LayeredModel
    sample: Batch
    assumed: tuple[str, ...] = ()
    masks: FullMasks = field(default_factory=FullMasks)

    def batch(self, size: int) -> Batch:
        return _batch(self.sample, size)


def build_named(choice: ModelChoice, *, device: str) -> NamedModel:
    """Build the model, with random weights, and its sample.

    Args:
        device: "cpu", or "meta" for shapes without memory.
    Raises:
        ImportError: the package that has the model is not installed.
        ValueError: no model has this name, it cannot be cut into sublayers, or there is no sample.
    """
    dtype, is_meta, masks = WEIGHT_DTYPES[choice.dtype], device == "meta", FullMasks()
    with torch.device(device), masks if is_meta else nullcontext():
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
    return NamedModel(layered, sample, built.assumed, masks)


def build_shapes(choice: ModelChoice) -> Built:
    """Build the model on the meta device, which takes no memory, as its package has it."""
    with torch.device("meta"), FullMasks():
        return build(choice, device="meta")


def _batch(sample: Mapping[str, Tensor], size: int) -> Batch:
    return {
        name: tensor.expand(size, *tensor.shape[1:]).contiguous()
        for name, tensor in sample.items()
    }


def build(choice: ModelChoice, *, device: str, usual_tokens: int = _USUAL_TOKENS) -> Built:
    """Build the model as its package has it, on the default device; see `build_named`.

    Args:
        usual_tokens: of a sample, for texts, where the choice has no seq_length.
    """
    if choice.is_own:
        return _build_own(choice.name, device)
    if not Path(choice.name).exists() and choice.name in _timm_names():
        choice.refuse("seq_length", "task")
        return _build_timm(choice)
    return _build_configured(_read_config(choice.name), choice, usual_tokens)


def _build_own(name: str, device: str) -> Built:
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
        case (nn.Module() | LayeredModel() as model, Mapping() as batch) if batch and all(
            isinstance(entry, Tensor) and entry.ndim and len(entry) for entry in batch.values()
        ):
            return Built(model, batch)
    raise ValueError(
        f"{name} returned {type(built).__name__}; it must return (model, batch): a model that "
        "adapt knows, and a batch of at least one sample, tensors by name"
    )


def _build_timm(choice: ModelChoice) -> Built:
    import timm

    side = choice.image_size
    options: dict[str, Any] = {} if side is None else {"img_size": side}
    try:
        model: Any = timm.create_model(choice.name, **options)
    except TypeError as error:
        raise ValueError(f"{choice.name} takes no image_size ({error}); leave it out") from error
    channels, *sides = model.default_cfg["input_size"]
    pixels = samples.drawn_images(channels, *(sides if side is None else (side, side)))
    batch = {"x": pixels, "y": torch.zeros(len(pixels), dtype=torch.int64, device="cpu")}
    return Built(model, batch)


def _timm_names() -> list[str]:
    # timm takes seconds to import, as transformers does: only who needs it does.
    if find_spec("timm") is None:
        return []
    import timm

    return list(timm.list_models())


def _read_config(name: str) -> Any:
    """Return a fresh configuration of transformers, of a file, a folder or its cache."""
    require("transformers", purpose=f"the model {name}")
    from huggingface_hub import constants
    from transformers import AutoConfig, BertConfig

    if name in BERTS:
        return BertConfig(**BERTS[name], architectures=["BertForQuestionAnswering"])
    options = {"local_files_only": True, "cache_dir": constants.HF_HUB_CACHE}
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # Families check their values with errors of their own.
        if Path(name).exists() or not isinstance(error, OSError):
            raise ValueError(f"transformers cannot read {name}: {error}") from error
        require("timm", purpose=f"the model {name}")
        near = difflib.get_close_matches(name, _timm_names()) or ["vit_base_patch16_224"]
        raise ValueError(
            f"no model is called {name!r}; give {', '.join(BERTS)}, a model of timm (such as "
            f"{', '.join(near)}), a folder or file with a configuration of transformers, or "
            '"module:function" for your own. A name of the hub is looked for in its cache alone '
            f"({constants.HF_HUB_CACHE}), as nothing is downloaded: fetch its config.json there "
            "first"
        ) from None


def _build_configured(config: Any, choice: ModelChoice, usual_tokens: int) -> Built:
    """Build a model of transformers; its configuration is altered as options ask."""
    kind, why = _model_class(config, choice)
    if choice.image_size is not None:
        seen = samples.image_config(config)
        if not hasattr(seen, "image_size"):
            choice.refuse("image_size")
        seen.image_size = choice.image_size
    named = next((task for task in TASKS if kind.__name__ in _classes(task).values()), None)
    task, assumed = choice.task or named, [f"{kind.__name__}, {why}"]
    if task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        # Decoders look for the last token before it.
        config.pad_token_id = 0
        assumed.append("token 0 pads, as the configuration says none")
    # A part may be built in the dtype of the checkpoint from which the configuration is.
    model: Any = kind(config).float()
    main = entry_names(model).inputs[0]
    if main == "input_ids":
        length = _checked_length(config, choice, usual_tokens)
        batch = samples.draw_texts(model, config, length)
        assumed.append(f"{length} tokens a sample")
    elif main == "pixel_values":
        choice.refuse("seq_length")
        batch = {main: samples.draw_images(config, choice.name)}
        assumed.append("images of {} x {} pixels".format(*batch[main].shape[2:]))
    else:
        raise ValueError(
            f"{choice.name} is a {kind.__name__}, which takes {main}: no sample of that is made "
            'up here; give "module:function", which returns the model and a batch'
        )
    batch |= samples.draw_targets(model, config, batch, task)
    return Built(model, batch, tuple(assumed))


def _classes(task: str) -> dict[str, str]:
    """Return transformers' classes for a task, by kinds of models."""
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES"))


def _model_class(config: Any, choice: ModelChoice) -> tuple[Any, str]:
    """Return the class of a model, and why it is this one."""
    import transformers
    from transformers.models.auto import modeling_auto

    kind, task = config.model_type, choice.task
    of_tasks = {known: found for known in TASKS if (found := _classes(known).get(kind))}
    if task in of_tasks:
        return getattr(transformers, of_tasks[task]), f"for --task {task}"
    known = ", ".join(of_tasks) or "none"
    if task is not None:
        raise ValueError(f"{kind} has no class for --task {task}; it has {known}")
    named, why = (config.architectures or [None])[0], "no class"
    if named is not None:
        is_bare = named == modeling_auto.MODEL_MAPPING_NAMES.get(kind)
        if not is_bare and hasattr(transformers, named):
            return getattr(transformers, named), "which the configuration names"
        why = f"{named}, which {'has no head' if is_bare else 'transformers does not have'}"
    raise ValueError(
        f"the configuration of {choice.name} names {why}; say what the model is for by --task, "
        f"for {kind} one of {known}"
    )


def _checked_length(config: Any, choice: ModelChoice, usual: int) -> int:
    asked, usual = choice.seq_length, min(usual, _BERT_TOKENS) if choice.name in BERTS else usual
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is None or most < 1:  # There is no limit.
        return asked or usual
    if asked is not None and asked > most:
        raise ValueError(f"seq_length is {asked}; {choice.name} takes up to {most}")
    return asked or min(usual, most)

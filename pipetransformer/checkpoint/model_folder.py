"""Write a folder from which other programs load a model, from a run or from its checkpoint.

model         files                           loaded by
transformers  config.json, model.safetensors  from_pretrained(folder)
timm          config.json, model.safetensors  create_model("local-dir:folder", pretrained=True)
peft          adapter_config.json,            PeftModel.from_pretrained(base, folder)
              adapter_model.safetensors
another       model.safetensors               load_state_dict

A checkpoint of a peft model is exported as of another: base and adapters in one file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from pipetransformer.checkpoint.format import Checkpoint, has_manifest, open_checkpoint
from pipetransformer.checkpoint.resume import CHECKPOINTS, OPAQUE, open_latest
from pipetransformer.durable_files import replace_file, replace_tensors
from pipetransformer.elastic import WEIGHTS, split_shard_name
from pipetransformer.model import qualified_name, unwrapped

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"

_PRETRAINED_MODEL = "transformers.modeling_utils.PreTrainedModel"
_PEFT_MODEL = "peft.peft_model.PeftModel"
_TIMM_VIT = "timm.models.vision_transformer.VisionTransformer"


def write_model_folder(
    model: nn.Module, state: Mapping[str, Tensor], folder: Path, processing_class: Any
) -> None:
    """Write a model with the weights of a state; its own may be missing.

    Of a peft model, or where transformers has added adapters, these are written alone.

    Args:
        folder: created if missing.
        processing_class: a tokenizer or a processor to save beside it, or None.
    Raises:
        OSError: the disk is full, or nothing may be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if _is_a(model, _PRETRAINED_MODEL) or _is_a(model, _PEFT_MODEL):
        _write_by_library(model, state, folder)
    else:
        replace_tensors(folder / WEIGHTS_FILE, state)
        if description := _describe_timm(model):
            replace_file(folder / CONFIG_FILE, description.encode())
    if processing_class is not None:
        processing_class.save_pretrained(folder)


@final
class DescribedModel:
    """Keep the text of a model's config.json in checkpoints, for `pipetransformer export`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, str]:
        """Return the file's text, "" for a model of neither library."""
        model: Any = self._model
        if not _is_a(model, _PRETRAINED_MODEL):
            return {"config": _describe_timm(model)}
        config = copy(model.config)
        config.architectures = [type(model).__name__]  # As its `save_pretrained` has it.
        return {"config": config.to_json_string()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Do nothing: a run that continues is given its model."""


def _is_a(model: nn.Module, name: str) -> bool:
    # By name: comparing classes would need the optional library.
    return any(qualified_name(kind) == name for kind in type(model).__mro__)


def _write_by_library(model: Any, state: Mapping[str, Tensor], folder: Path) -> None:
    if _is_a(model, _PEFT_MODEL):
        # What no forward reads, such as another adapter's head, is in no checkpoint.
        held = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
        state = {**held, **state}
    with _prompts_of(model, state):
        model.save_pretrained(folder, state_dict=dict(state))
    # Adapters with a name of their own have a folder of it.
    for config in (*folder.glob(f"*{CONFIG_FILE}"), *folder.glob(f"*/adapter_{CONFIG_FILE}")):
        for path in config.parent.glob("*.safetensors"):
            path.chmod(config.stat().st_mode)  # safetensors lets nobody but its owner read a file.


@contextmanager
def _prompts_of(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Have a tuned prompt be a state's within the block: peft reads it from the model itself."""
    name = "prompt_encoder"
    live = model._modules.get(name)
    if live is None:
        yield
        return
    start = f"{name}."
    saved = {n.removeprefix(start): t for n, t in state.items() if n.startswith(start)}
    prompts = deepcopy(live)
    prompts.load_state_dict(saved, assign=True)
    try:
        model._modules[name] = prompts
        yield
    finally:
        model._modules[name] = live


def _describe_timm(model: Any) -> str:
    """Return the config.json of a model that timm's factory built, "" for another model."""
    if unwrapped(model) is not model:  # Peft's answers for the model within, whose names differ.
        return ""
    description: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    if "architecture" not in description:
        return ""
    config = {
        "architecture": description["architecture"],
        "num_classes": model.num_classes,
        "model_args": _built_with(model),
        "pretrained_cfg": {**description, "num_classes": model.num_classes},
    }
    return json.dumps(config, indent=2, default=str)


def _built_with(model: Any) -> dict[str, Any]:
    """Return the arguments in which a timm model may differ from its architecture's defaults."""
    built: dict[str, Any] = {}
    if (pixels := getattr(getattr(model, "patch_embed", None), "img_size", None)) is not None:
        built["img_size"] = pixels
    if _is_a(model, _TIMM_VIT):
        built["depth"], built["embed_dim"] = len(model.blocks), model.embed_dim
        built["num_heads"] = model.blocks[0].attn.num_heads
        built["global_pool"] = model.global_pool
    return built


def add_export_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, help="a checkpoint, or the folder= of a run: then its newest one"
    )
    parser.add_argument(
        "out",
        type=Path,
        help=f"gets {WEIGHTS_FILE}, and {CONFIG_FILE} for a model of transformers or timm's "
        "factory; new, or empty",
    )
    parser.set_defaults(run=run_export)


def run_export(options: argparse.Namespace, show: Callable[[str], None]) -> None:
    """Carry out the command.

    Raises:
        ValueError: there is no checkpoint, or OUT has content.
        CorruptCheckpointError: the checkpoint is damaged.
    """
    out: Path = options.out
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is no empty folder; give a new one")
    checkpoint = find_checkpoint(options.source)
    tensors = read_weights(checkpoint)
    replace_tensors(out / WEIGHTS_FILE, tensors)
    if config := checkpoint.scalars["parts"].get("model", {}).get("config"):
        replace_file(out / CONFIG_FILE, config.encode())
    show(f"{checkpoint.folder}: {len(tensors)} tensors after step {checkpoint.step} -> {out}")
    if OPAQUE in checkpoint.scalars:
        show("The quantized weights are not among them: load them from where the run had them.")


def find_checkpoint(source: Path) -> Checkpoint:
    """Open a checkpoint, or the newest usable one of a run."""
    if has_manifest(source):
        return open_checkpoint(source)
    for directory in (source / CHECKPOINTS, source):
        if directory.is_dir() and (found := open_latest(directory, group=None)) is not None:
            return found
    raise ValueError(
        f"{source} holds no checkpoint; give the folder= of a run that saves, or one of the "
        f"step-* folders in its {CHECKPOINTS}"
    )


def read_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Read the entries of the model's `state_dict`.

    Raises:
        CorruptCheckpointError: a file is not what was written.
    """
    held: dict[str, Tensor] = {}
    for shard in checkpoint.shards:
        if split_shard_name(shard)[1] == WEIGHTS:
            held.update(checkpoint.read(shard))
    # The shards also hold buffers that are not persistent.
    return {name: held[name] for name in checkpoint.scalars["state_names"] if name in held}

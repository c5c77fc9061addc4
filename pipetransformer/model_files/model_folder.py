"""Write a folder from which other programs load a model.

model         files                           loaded by
transformers  config.json, model.safetensors  from_pretrained(folder)
timm          config.json, model.safetensors  create_model("local-dir:folder", pretrained=True)
another       model.safetensors               load_state_dict
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pipetransformer.adapters import qualified_name
from pipetransformer.durable_files import replace_file, replace_tensors

WEIGHTS_FILE = "model.safetensors"

_PRETRAINED_MODEL = "transformers.modeling_utils.PreTrainedModel"


def write_model_folder(
    model: nn.Module, state: Mapping[str, Tensor], folder: Path, processing_class: Any
) -> None:
    """Write a model, which may be without weights itself, with a state.

    Args:
        model: says what the folder describes.
        state: all its weights, by its own names.
        folder: created if missing.
        processing_class: a tokenizer or a processor to be saved beside it, or None.
    Raises:
        OSError: the disk is full, or nothing may be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(qualified_name(kind) == _PRETRAINED_MODEL for kind in type(model).__mro__):
        _write_transformers(model, state, folder)
    else:
        replace_tensors(folder / WEIGHTS_FILE, state)
        _describe_timm(model, folder)
    if processing_class is not None:
        processing_class.save_pretrained(folder)


def _write_transformers(model: Any, state: Mapping[str, Tensor], folder: Path) -> None:
    model.save_pretrained(folder, state_dict=dict(state))
    mode = (folder / "config.json").stat().st_mode
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)  # safetensors lets nobody but its owner read a file.


def _describe_timm(model: Any, folder: Path) -> None:
    """Write what timm's factory built the model from; nothing for a model of another kind."""
    description: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    pixels = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if "architecture" in description:
        config = {
            "architecture": description["architecture"],
            "num_classes": model.num_classes,
            "model_args": {} if pixels is None else {"img_size": pixels},
            "pretrained_cfg": {**description, "num_classes": model.num_classes},
        }
        replace_file(folder / "config.json", json.dumps(config, indent=2, default=str).encode())

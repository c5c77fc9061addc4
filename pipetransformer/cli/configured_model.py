"""Build a model of transformers from its configuration, without weights, and samples for it.

The configuration is a file, in a folder, or in the cache in which transformers keeps downloads.
Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.cli.model_choice import TASKS, ModelChoice
from pipetransformer.extras import require
from pipetransformer.model import LayeredModel, entry_names

USUAL_TOKENS = 512
NUM_SAMPLES = 4


@dataclass(frozen=True)
class Built:
    """Hold a model as its package builds it.

    Args:
        batch: one sample or more that it takes, with targets.
        assumed: what its name does not say, a sentence each.
        task: one of TASKS, where it is known.
        head: name of what a fine-tuning trains in full, where it is known.
    """

    model: nn.Module | LayeredModel
    batch: Mapping[str, Tensor]
    assumed: tuple[str, ...] = ()
    task: str | None = None
    head: str | None = None


def find_config(name: str) -> Any | None:
    """Return the configuration that a file, a folder or transformers' cache has; None if none has.

    Raises:
        ImportError: there is one, and transformers is not installed.
        ValueError: the folder has no config.json, or it is not of a model that transformers knows.
    """
    path: Path | None = Path(name)
    if Path(name).is_dir():
        path = Path(name) / "config.json"
        if not path.is_file():
            raise ValueError(f"the folder {name} has no config.json; save the configuration there")
    elif not Path(name).is_file():
        path = _in_cache(name)
    return None if path is None else _read(path)


def cache_folder() -> str:
    """Name the folder in which transformers keeps what it has downloaded."""
    if find_spec("huggingface_hub") is None:
        return "which is not there, as transformers is not installed"
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _in_cache(name: str) -> Path | None:
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json", cache_dir=cache_folder())
    except ValueError:  # No repository can have this name.
        return None
    return Path(found) if isinstance(found, str) else None


def _read(path: Path) -> Any:
    require("transformers", purpose=f"the model of {path}")
    # transformers takes seconds to import, and only its own models need it.
    from transformers import AutoConfig

    try:
        values = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}; give a model's config.json") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(
            f"{path} has no model_type, so it is not of transformers; give the config.json that "
            "save_pretrained has written"
        )
    try:
        return AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # Families check their values with errors of their own.
        raise ValueError(f"transformers cannot read {path}: {error}") from error


def build_configured(config: Any, choice: ModelChoice, *, usual_tokens: int) -> Built:
    """Build a model with random weights on the default device, and samples in host memory.

    Args:
        config: may be altered, as options ask.
        usual_tokens: of a sample, where nobody asks for a number and the model takes as many.
    Raises:
        ValueError: the configuration names no class with a head, or an option does not apply.
    """
    kind, why = model_class(config, choice)
    if choice.image_size is not None:
        _set_image_size(config, choice)
    task, assumed = choice.task or _task_of(kind), [f"{kind.__name__}, {why}"]
    if task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        # Decoders look for the last token before it.
        config.pad_token_id = 0
        assumed.append("token 0 pads, as the configuration says none")
    # A part may be built in the dtype of the checkpoint from which the configuration is.
    model: nn.Module = kind(config).float()
    main = entry_names(model).inputs[0]
    if main == "input_ids":
        length = _checked_length(config, choice, usual_tokens)
        batch = _texts(model, config, length)
        assumed.append(f"{length} tokens a sample")
    elif main == "pixel_values":
        choice.refuse("seq_length")
        batch = {main: _images(config, choice.name)}
        assumed.append("images of {} x {} pixels".format(*batch[main].shape[2:]))
    else:
        raise ValueError(
            f"{choice.name} is a {kind.__name__}, which takes {main}: no sample of that is made "
            'up here; give "module:function", which returns the model and a batch'
        )
    batch |= _targets(model, config, batch, task)
    return Built(model, batch, tuple(assumed), task, _head_of(model))


def model_class(config: Any, choice: ModelChoice) -> tuple[Any, str]:
    """Return the class of a model, and why it is this one.

    Raises:
        ValueError: the family has no class for the task, or the configuration names none that has
            a head.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    kind, task = config.model_type, choice.task
    of_task = {
        known: getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").get(kind)
        for known, table in TASKS.items()
    }
    known = ", ".join(one for one, found in of_task.items() if found) or "none"
    if task is not None:
        if of_task[task] is None:
            raise ValueError(f"{kind} has no class for --task {task}; it has {known}")
        return getattr(transformers, of_task[task]), f"for --task {task}"
    named = (config.architectures or [None])[0]
    is_bare = named == modeling_auto.MODEL_MAPPING_NAMES.get(kind)
    if named is not None and not is_bare and hasattr(transformers, named):
        return getattr(transformers, named), "which the configuration names"
    why = "no class"
    if named is not None:
        why = f"{named}, which {'has no head' if is_bare else 'transformers does not have'}"
    raise ValueError(
        f"the configuration of {choice.name} names {why}; say what the model is for by --task, "
        f"for {kind} one of {known}"
    )


def _task_of(kind: Any) -> str | None:
    from transformers.models.auto import modeling_auto

    for task, table in TASKS.items():
        if kind.__name__ in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").values():
            return task
    return None


def _head_of(model: nn.Module) -> str | None:
    """Name what stands beside the body of a model of transformers, with weights of its own."""
    body = getattr(model, "base_model_prefix", "")
    children = model.named_children()
    return next((n for n, m in children if n != body and any(True for _ in m.parameters())), None)


def _checked_length(config: Any, choice: ModelChoice, usual: int) -> int:
    asked, most = choice.seq_length, config.get_text_config()
    most = getattr(most, "max_position_embeddings", None)
    if most is None or most < 1:  # There is no limit.
        return asked or usual
    if asked is not None and asked > most:
        raise ValueError(f"seq_length is {asked}; {choice.name} takes up to {most}")
    return asked or min(usual, most)


def _texts(model: nn.Module, config: Any, length: int) -> dict[str, Tensor]:
    """Draw texts of ordinary tokens; a mask makes the second one shorter."""
    text, takes = config.get_text_config(), entry_names(model).inputs
    special = special_tokens(config)
    ordinary = [n for n in range(1, min(text.vocab_size, 1000)) if n not in special.values()]
    shape = NUM_SAMPLES, length
    tokens = torch.tensor(ordinary, device="cpu")[_drawn(len(ordinary), shape)]
    end = special.get("eos_token_id")
    if end is not None:
        tokens[:, -1] = end  # BART reads its classes off there.
    batch = {"input_ids": tokens}
    if "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = tokens.clone()
    elif "attention_mask" in takes:
        mask = batch["attention_mask"] = torch.ones_like(tokens)
        mask[1, -(length // 3) :] = 0 if length >= 3 else 1
        tokens[mask == 0] = special.get("pad_token_id", ordinary[0])
    return batch


def special_tokens(config: Any) -> dict[str, int]:
    """Return the tokens that a configuration gives a meaning, by the names of its settings."""
    return {
        name: number
        for part in (config, config.get_text_config())
        for name, number in part.to_dict().items()
        if name.endswith("token_id") and isinstance(number, int) and number >= 0
    }


def _targets(
    model: nn.Module, config: Any, batch: Mapping[str, Tensor], task: str | None
) -> dict[str, Tensor]:
    names, main = entry_names(model).targets, next(iter(batch.values()))
    if names != ("labels",):
        return {name: _drawn(main.shape[1], (NUM_SAMPLES,)) for name in names}
    if task in ("sequence-classification", "image-classification"):
        is_number = config.num_labels == 1
        labels = _drawn(max(2, config.num_labels), (NUM_SAMPLES,))
        return {"labels": labels.float() if is_number else labels}
    is_of_words = task in ("causal", "masked", None)
    labels = main.clone() if is_of_words else _drawn(config.num_labels, tuple(main.shape))
    if "attention_mask" in batch:
        labels[batch["attention_mask"] == 0] = -100
    return {"labels": labels}


def _drawn(bound: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(bound, shape, generator=generator, device="cpu")


def _set_image_size(config: Any, choice: ModelChoice) -> None:
    seen = _of_images(config)
    if not hasattr(seen, "image_size"):
        choice.refuse("image_size")
    seen.image_size = choice.image_size


def _images(config: Any, name: str) -> Tensor:
    seen = _of_images(config)
    sides = getattr(seen, "image_size", None)
    if sides is None:
        raise ValueError(f"the configuration of {name} has no image_size; add it there")
    both = (sides, sides) if isinstance(sides, int) else tuple(sides)
    return drawn_images(getattr(seen, "num_channels", 3), *both)


def drawn_images(*shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.rand(NUM_SAMPLES, *shape, generator=generator, device="cpu")


def _of_images(config: Any) -> Any:
    """Return the configuration's part that is of images."""
    return getattr(config, "vision_config", None) or config

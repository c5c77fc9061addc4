"""List the classes of which a part is frozen, and say by a short rule which module that is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from experiments.census.batches import NUM_CLASSES
from experiments.census.subjects import Subject, of_mappings
from experiments.random_models import Headed

PART_TASKS = {
    "image-text": "IMAGE_TEXT_TO_TEXT",
    "speech": "SPEECH_SEQ_2_SEQ",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "ctc": "CTC",
    "audio": "AUDIO_CLASSIFICATION",
    "detection": "OBJECT_DETECTION",
    "zero-shot": "ZERO_SHOT_OBJECT_DETECTION",
    "instance": "INSTANCE_SEGMENTATION",
    "semantic": "SEMANTIC_SEGMENTATION",
    "universal": "UNIVERSAL_SEGMENTATION",
    "depth": "DEPTH_ESTIMATION",
}
"""By its word here, what transformers calls a task's mapping."""

BACKBONES = (
    "timm/resnet18", "timm/convnext_atto", "timm/efficientnet_lite0", "timm/mobilenetv3_small_050",
    "timm/regnetx_002", "timm/vit_tiny_patch16_224", "timm/swin_tiny_patch4_window7_224",
    "torchvision/resnet18", "torchvision/mobilenet_v3_small", "torchvision/shufflenet_v2_x0_5",
    "torchvision/squeezenet1_1", "torchvision/efficientnet_b0", "torchvision/densenet121",
)  # fmt: skip
"""What lies below a linear head, as library/model."""

SIDE = 64
"""Pixels of such a backbone's image in a row."""

_TOWERS = (
    "vision_tower", "visual", "vision_model", "vision_encoder", "image_encoder", "audio_tower",
    "speech_encoder", "backbone", "encoder",
)  # fmt: skip
"""What such a module is called, the first that there is; the least deep of its name."""

_BASE_FIRST = ("ctc", "audio", "semantic", "depth", "universal")


def part_subjects() -> list[Subject]:
    """Return each class of transformers once for each task, and backbones below a head."""
    heads = [Subject(name.partition("/")[2], "backbone", name) for name in BACKBONES]
    return [*of_mappings(PART_TASKS), *heads]


def part_of(model: nn.Module, task: str) -> str:
    """Return the name of the module that freezes.

    Raises:
        LookupError: by the rule there is none.
    """
    names = {name.rpartition(".")[2]: name for name in reversed([*_by_depth(model)])}
    base = getattr(model, "base_model_prefix", "")
    if task in _BASE_FIRST and base in dict(model.named_children()) and "backbone" not in names:
        return str(base)
    found = next((names[word] for word in _TOWERS if word in names), None)
    if found is None:
        encoder = getattr(model, "get_encoder", lambda: model)()
        found = next(name for name, one in model.named_modules() if one is encoder)
    if not found:
        raise LookupError("it has no tower, encoder or backbone")
    return found


def _by_depth(model: nn.Module) -> list[str]:
    return sorted((name for name, _ in model.named_modules()), key=lambda name: name.count("."))


def headed(subject: Subject) -> nn.Module:
    """Return a backbone below a head, with random weights."""
    if subject.family.startswith("timm/"):
        import timm

        sized: dict[str, Any] = {"img_size": SIDE} if "patch" in subject.name else {}
        backbone = timm.create_model(subject.name, num_classes=0, **sized)
    else:
        import torchvision

        backbone = torchvision.models.get_model(subject.name, num_classes=16)
    with torch.no_grad():
        width = backbone.eval()(torch.zeros(1, 3, SIDE, SIDE)).shape[1]
    return Headed(backbone, width, NUM_CLASSES)

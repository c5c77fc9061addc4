"""Fine-tune a timm ViT on CIFAR or on a tree of images in ImageNet's layout."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.layers import resample_abs_pos_embed
from timm.models import VisionTransformer
from torch import Tensor, nn
from torchvision.transforms import v2

from experiments.tasks.image_files import CIFARS, read_split
from experiments.tasks.workload import Workload
from pipetransformer import EvalPrediction


@dataclass(frozen=True)
class ImageSource:
    """Say which model and which data.

    Args:
        model: timm's name.
        weights: a safetensors file of such a model, of any image size and head; None takes timm's
            own pretrained ones where `pretrained`, else random ones.
        pretrained: whether to ask timm for weights.
        data: an npz file of CIFAR, JPEGs or decoded, or the folder that holds its Python version
            (cifar-10-batches-py or cifar-100-python); or a folder with train/ and val/. None
            takes the hub's data set.
        pixels: of an image's edge; None takes the model's own.
        augment: crop and flip training images at random.
        views: fixed views of each augmented image; 0 takes a new one in every epoch.
        most_train, most_eval: samples; None takes all. Chosen at random, the same for any seed.
        seed: of the new head.
    """

    model: str
    weights: str | None
    pretrained: bool
    data: str | None
    pixels: int | None
    augment: bool
    views: int
    most_train: int | None
    most_eval: int | None
    seed: int


class Images:
    """Read images by index, as the model's own preprocessing wants them.

    Args:
        encoded: by index images, JPEG's bytes or arrays (H, W, 3) of uint8; or a tree's.
        labels: (N,) classes.
        transform: makes the model's input of a PIL image.
    """

    def __init__(self, encoded: Any, labels: Any, transform: Any) -> None:
        self._encoded, self.labels, self._transform = encoded, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._encoded[index]
        if not isinstance(image, Image.Image):
            is_jpeg = isinstance(image, bytes)
            image = Image.open(io.BytesIO(image)) if is_jpeg else Image.fromarray(image)
        if image.mode[0] in "IF":
            raise ValueError(
                f"image {index} has more than 8 bits a channel (mode {image.mode}), which would "
                "turn white; convert it to 8 bits"
            )
        return self._transform(image.convert("RGB")), int(self.labels[index])


def image_workload(name: str, source: ImageSource) -> Workload:
    """Read images and describe the task."""
    train = read_split(name, source.data, "train", source.most_train)
    evaluation = read_split(name, source.data, "test", source.most_eval)
    if unlike := set(train.classes) ^ set(evaluation.classes):
        raise ValueError(
            f"{source.data or name} has other classes to train than to evaluate: "
            f"{sorted(unlike)[:3]} are in one alone"
        )
    num_classes, labels = len(train.classes), evaluation.labels
    fixed, varied = transforms(source, whole=name in CIFARS)

    def judge(prediction: EvalPrediction) -> dict[str, float]:
        given: Any = prediction.predictions
        return {"accuracy": 100 * float((given.argmax(axis=1) == prediction.label_ids).mean())}

    def write(_: str, prediction: Any, path: Path) -> None:
        classes = prediction.predictions.argmax(axis=1)
        lines = [
            f"{n}\t{given}\t{wanted}\n"
            for n, given, wanted in zip(evaluation.numbers, classes, labels, strict=True)
        ]
        path.with_suffix(".tsv").write_text("index\tprediction\tlabel\n" + "".join(lines))

    return Workload(
        name,
        lambda small: build_vit(source, num_classes, small=small, whole=name in CIFARS),
        Images(train.encoded, train.labels, varied if source.augment else fixed),
        Images(evaluation.encoded, labels, fixed),
        image_forward,
        judge,
        "accuracy",
        write,
        {},
        num_views=source.views if source.augment else None,
        names=("x", "y"),
    )


def transforms(source: ImageSource, *, whole: bool) -> tuple[Any, Any]:
    """Return what makes a model's input of an image: as timm does, and augmented.

    Args:
        source: its model, of whatever source, says how.
        whole: whether an image is squeezed into a square, and nothing of it cut off.
    Raises:
        ValueError: the model is no VisionTransformer.
    """
    refuse_folder(source.model)
    try:
        with torch.device("meta"):
            model = timm.create_model(source.model, pretrained=False)
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"--model_name_or_path {source.model}: {error}") from error
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"--model_name_or_path {source.model} is a {type(model).__name__}; give a "
            "VisionTransformer, such as vit_base_patch16_224"
        )
    config = resolve_model_data_config(model)
    if source.pixels is not None:
        patch = model.patch_embed.patch_size[0]
        if source.pixels % patch:
            raise ValueError(
                f"--image_size is {source.pixels}, no multiple of the {patch} pixels of a patch"
            )
        config["input_size"] = (3, source.pixels, source.pixels)
    if whole:
        config |= _WHOLE
    crop = v2.RandomResizedCrop(
        config["input_size"][1:],
        scale=(0.5, 1.0),
        interpolation=v2.InterpolationMode(config["interpolation"]),
    )
    varied = [crop, v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    normalise = v2.Normalize(config["mean"], config["std"])
    return create_transform(**config, is_training=False), v2.Compose([*varied, normalise])


def refuse_folder(name: str) -> None:
    """Raise a ValueError where a name stands for a folder that holds no model of timm."""
    kind, _, path = name.partition(":")
    option = f"--model_name_or_path {name}"
    if kind != "local-dir":
        if Path(name).is_dir() or name.startswith((".", "/")):
            raise ValueError(f"{option} is a folder; timm's are given as local-dir:FOLDER")
        return
    file = Path(path, "config.json")
    if not file.is_file():
        raise ValueError(f"{option}: there is no {file}; give the folder of a model of timm")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{option}: {file} is no JSON: {error}") from error
    if "architecture" not in config:
        other = config.get("architectures") or ["no architecture"]
        raise ValueError(
            f"{option} is of {other[0]}, no model of timm; give a timm model, or train "
            "transformers' by pipetransformer.hf.Trainer"
        )


_WHOLE = {"crop_pct": 1.0, "crop_mode": "squash"}
"""How timm says that an image is squeezed into a square, and nothing of it cut off."""


def image_forward(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss and the logits."""
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits, batch["y"]), logits


def build_vit(
    source: ImageSource, num_classes: int, *, small: bool, whole: bool = False
) -> nn.Module:
    """Build the model, or one with the lower half of its blocks; see `transforms` for `whole`."""
    torch.manual_seed(source.seed)
    options: dict[str, Any] = {"num_classes": num_classes}
    if source.pixels is not None:
        options["img_size"] = source.pixels
    if small:
        blocks: Any = timm.create_model(source.model, **options).blocks
        options["depth"] = (len(blocks) + 1) // 2
        torch.manual_seed(source.seed)
    model: Any = timm.create_model(
        source.model, pretrained=source.pretrained and source.weights is None, **options
    )
    if whole:  # Saved, so that who loads it sees images as it has.
        model.pretrained_cfg = {**model.pretrained_cfg, **_WHOLE}
    if source.weights is not None:
        load_weights(model, Path(source.weights))
    built: nn.Module = model
    return built


def load_weights(model: Any, path: Path) -> None:
    """Fill all but the head from a file, positions resampled to the model's image size.

    Raises:
        ValueError: the file lacks a weight, or holds one of another shape.
    """
    given = {n: t.float() for n, t in safetensors.torch.load_file(path).items()}
    wanted = {n: t for n, t in model.state_dict().items() if not n.startswith("head.")}
    name = "pos_embed"
    if name in given and given[name].shape != wanted[name].shape:
        prefix = 0 if getattr(model, "no_embed_class", False) else model.num_prefix_tokens
        given[name] = resample_abs_pos_embed(
            given[name], list(model.patch_embed.grid_size), num_prefix_tokens=prefix
        )
    wrong = [n for n, t in wanted.items() if n not in given or given[n].shape != t.shape]
    if wrong:
        raise ValueError(f"{path} has no {wrong[:3]} of the model's shapes; give weights of it")
    model.load_state_dict({n: given[n] for n in wanted}, strict=False)

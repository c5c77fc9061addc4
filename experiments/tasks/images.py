"""Fine-tune a timm ViT on CIFAR or on a tree of images in ImageNet's layout."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.layers import resample_abs_pos_embed
from timm.models import VisionTransformer
from torch import Tensor, nn
from torchvision.datasets import CIFAR10, CIFAR100, ImageFolder
from torchvision.transforms import v2

from experiments.tasks.workload import Workload
from pipetransformer import EvalPrediction

CIFARS: Mapping[str, type[CIFAR10]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}
"""By the name of a data set: what reads it, and knows its files by their hashes."""


@dataclass(frozen=True)
class ImageSource:
    """Say which model and which data.

    Args:
        model: timm's name.
        weights: a safetensors file of such a model, of any image size and head; None takes timm's
            own pretrained ones where `pretrained`, else random ones.
        pretrained: whether to ask timm for weights.
        data: an npz file of CIFAR, JPEGs or decoded, or the folder that holds its Python version
            (cifar-10-batches-py or cifar-100-python); or a folder with train/ and val/.
        pixels: of an image's edge; None takes the model's own.
        augment: crop and flip training images at random.
        views: fixed views of each augmented image; 0 takes a new one in every epoch.
        most_train, most_eval: samples; None takes all. Chosen at random, the same for any seed.
        seed: of the new head.
    """

    model: str
    weights: str | None
    pretrained: bool
    data: str
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


@dataclass(frozen=True)
class Split:
    """Hold a split: images by position, their (N,) classes and numbers in the files, all classes'
    names."""

    encoded: Any
    labels: Any
    numbers: Any
    classes: tuple[str, ...]


def image_workload(name: str, source: ImageSource) -> Workload:
    """Read images and describe the task."""
    train = read_split(name, source.data, "train", source.most_train)
    evaluation = read_split(name, source.data, "test", source.most_eval)
    if unlike := set(train.classes) ^ set(evaluation.classes):
        raise ValueError(
            f"{source.data} has other classes to train than to evaluate: {sorted(unlike)[:3]} are "
            "in one alone"
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
        lambda small: build_vit(source, num_classes, small=small),
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
    try:
        with torch.device("meta"):
            model = timm.create_model(source.model, pretrained=False)
    except RuntimeError as error:
        raise ValueError(f"--model_name_or_path {source.model}: {error}") from error
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"--model_name_or_path {source.model} is a {type(model).__name__}; give a "
            "VisionTransformer, such as vit_base_patch16_224"
        )
    config = resolve_model_data_config(model)
    if source.pixels is not None:
        config["input_size"] = (3, source.pixels, source.pixels)
    if whole:
        config |= {"crop_pct": 1.0, "crop_mode": "squash"}
    crop = v2.RandomResizedCrop(
        config["input_size"][1:],
        scale=(0.5, 1.0),
        interpolation=v2.InterpolationMode(config["interpolation"]),
    )
    varied = [crop, v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    normalise = v2.Normalize(config["mean"], config["std"])
    return create_transform(**config, is_training=False), v2.Compose([*varied, normalise])


def image_forward(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss and the logits."""
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits, batch["y"]), logits


def build_vit(source: ImageSource, num_classes: int, *, small: bool) -> nn.Module:
    """Build the model, or one with the lower half of its blocks."""
    torch.manual_seed(source.seed)
    options: dict[str, Any] = {"num_classes": num_classes}
    if source.pixels is not None:
        options["img_size"] = source.pixels
    if small:
        blocks: Any = timm.create_model(source.model, **options).blocks
        options["depth"] = (len(blocks) + 1) // 2
        torch.manual_seed(source.seed)
    model: nn.Module = timm.create_model(
        source.model, pretrained=source.pretrained and source.weights is None, **options
    )
    if source.weights is not None:
        load_weights(model, Path(source.weights))
    return model


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


def read_split(name: str, data: str, split: str, most: int | None) -> Split:
    """Read the "train" or "test" images of a data set, so many of them, chosen at random.

    Raises:
        ValueError: the data are missing, or not of the data set.
    """
    if name in CIFARS:
        classes = tuple(map(str, range(100 if name == "cifar100" else 10)))
        encoded, labels = _read_cifar(name, Path(data), split, num_classes=len(classes))
    else:
        folder = Path(data, "train" if split == "train" else "val")
        if not folder.is_dir():
            raise ValueError(f"{folder} is missing; give --data, a folder with train/ and val/")
        try:
            tree = ImageFolder(folder, loader=Image.open)
        except FileNotFoundError as error:  # It has no classes, or one of them no images.
            raise ValueError(f"{folder} is no tree of CLASS/IMAGE: {error}") from error
        classes, labels = tuple(tree.classes), np.array(tree.targets)
        encoded = _Tree(tree)
    # Files are ordered by class.
    chosen = np.random.default_rng(0).permutation(len(labels))[:most]
    return Split(_Chosen(encoded, chosen), labels[chosen], chosen, classes)


def _read_cifar(name: str, path: Path, split: str, *, num_classes: int) -> tuple[Any, Any]:
    """Read an npz file, or the Python version, whose files torchvision knows by their hashes.

    Raises:
        ValueError: the folder does not hold the published files.
    """
    if path.suffix == ".npz":
        return _read_npz(path, split, num_classes)
    try:
        found = CIFARS[name](path, train=split == "train")
    except RuntimeError as error:
        raise ValueError(
            f"{path} does not hold the files of {name}'s Python version as they are published; "
            f"give the folder in which {CIFARS[name].base_folder} is, or an npz file"
        ) from error
    return found.data, np.asarray(found.targets, np.int64)


def _read_npz(path: Path, split: str, num_classes: int) -> tuple[Any, Any]:
    try:
        with np.load(path) as file:  # numpy reads no pickles unless it is told to.
            arrays = {key: file[key] for key in file.files if key.startswith(split)}
    except (EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no npz file of arrays: {error}") from error
    known = (f"{split}_labels", f"{split}_y")
    name = next((key for key in known if key in arrays), None)
    if name is None:
        raise ValueError(f"{path} has neither {' nor '.join(known)}; it has {sorted(arrays)}")
    labels = arrays.pop(name).astype(np.int64).reshape(-1)
    images: Any
    if f"{split}_offsets" in arrays:
        images = _Jpegs(arrays[f"{split}_data"], arrays[f"{split}_offsets"])
        num = len(images.offsets) - 1
    else:
        images = next((one for one in arrays.values() if one.ndim == 4), None)
        if images is None or images.dtype != np.uint8 or images.shape[3] != 3:
            raise ValueError(f"{path} has no images of {split}: give (N, H, W, 3) uint8, or JPEGs")
        num = len(images)
    if num != len(labels) or (len(labels) and not 0 <= labels.min() <= labels.max() < num_classes):
        raise ValueError(
            f"{path} has {num} images of {split} and {len(labels)} labels; give one for each, of "
            f"0 to {num_classes - 1}"
        )
    return images, labels


@dataclass(frozen=True)
class _Jpegs:
    data: Any
    offsets: Any

    def __getitem__(self, index: int) -> bytes:
        found: bytes = self.data[self.offsets[index] : self.offsets[index + 1]].tobytes()
        return found


@dataclass(frozen=True)
class _Tree:
    tree: ImageFolder

    def __getitem__(self, index: int) -> Image.Image:
        image: Image.Image = self.tree[index][0]
        return image


@dataclass(frozen=True)
class _Chosen:
    """Read some images of all."""

    images: Any
    chosen: Any

    def __getitem__(self, index: int) -> Any:
        return self.images[int(self.chosen[index])]

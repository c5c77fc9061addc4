"""Read the images of a data set: CIFAR's files, trees of images, or the hub's data sets."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100, ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

CIFARS: Mapping[str, type[CIFAR10]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}
"""By the name of a data set: what reads it, and knows its files by their hashes."""
NUM_CLASSES: Mapping[str, int] = {"cifar10": 10, "cifar100": 100}
_OTHER_LABELS: Mapping[str, Mapping[int, str]] = {
    "cifar100": {10: "cifar10's", 20: "cifar100's coarse classes"}
}
"""By data set: numbers of classes whose labels would pass for its own, and whose they are."""
_HUB: Mapping[str, tuple[str, str, str, str]] = {
    "cifar10": ("uoft-cs/cifar10", "img", "label", "test"),
    "cifar100": ("uoft-cs/cifar100", "img", "fine_label", "test"),
    "imagenet": ("ILSVRC/imagenet-1k", "image", "label", "validation"),
}
"""The hub's data sets: their names, columns of images and labels, and evaluation sets."""


class ImageTree(ImageFolder):
    """Read root/CLASS/IMAGE, without what programs hide there.

    Of folders and files that begin with a dot, such as .ipynb_checkpoints, none is a class or an
    image, and neither is a __MACOSX.
    """

    def __init__(self, root: str | Path, transform: Any = None, **options: Any) -> None:
        super().__init__(str(root), transform, is_valid_file=self._is_image, **options)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the classes' names in order, and their numbers."""
        folders = (one.name for one in Path(directory).iterdir() if one.is_dir())
        if not (names := sorted(name for name in folders if not _is_hidden(name))):
            raise FileNotFoundError(f"it has no folders of classes: {directory}")
        return names, {name: number for number, name in enumerate(names)}

    def _is_image(self, path: str) -> bool:
        parts = Path(path).relative_to(self.root).parts
        return path.lower().endswith(IMG_EXTENSIONS) and not any(map(_is_hidden, parts))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


@dataclass(frozen=True)
class Split:
    """Hold a split: images by position, their (N,) classes and numbers in the files, all classes'
    names."""

    encoded: Any
    labels: Any
    numbers: Any
    classes: tuple[str, ...]


def read_split(name: str, data: str | None, split: str, most: int | None) -> Split:
    """Read the "train" or "test" images of a data set, so many of them, chosen at random.

    Raises:
        ValueError: the data are missing, or not of the data set.
    """
    if data is None:
        encoded, labels, classes = _read_hub(name, split)
    elif name in CIFARS:
        classes = tuple(map(str, range(NUM_CLASSES[name])))
        encoded, labels = _read_cifar(name, Path(data), split, num_classes=len(classes))
    else:
        encoded, labels, classes = _read_tree(Path(data), split)
    if not len(labels):
        raise ValueError(f"{data or name} has no images of {split}")
    # Files are ordered by class.
    chosen = np.random.default_rng(0).permutation(len(labels))[:most]
    return Split(_Chosen(encoded, chosen), labels[chosen], chosen, classes)


def _read_tree(data: Path, split: str) -> tuple[Any, Any, tuple[str, ...]]:
    """Read root/SPLIT/CLASS/IMAGE, or a flat root/val as ImageNet's archive has it.

    The root is the folder, or its ILSVRC/Data/CLS-LOC, as Kaggle's archive has it.
    """
    root = next(
        (one for one in (data, data / "ILSVRC/Data/CLS-LOC") if (one / "train").is_dir()), data
    )
    folder = root / ("train" if split == "train" else "val")
    if not folder.is_dir():
        raise ValueError(f"{folder} is missing; give --data, a folder with train/ and val/")
    if split != "train" and (flat := sorted(folder.glob("ILSVRC2012_val_*.JPEG"))):
        return _read_flat(data, flat)
    try:
        tree = ImageTree(folder, loader=Image.open)
    except FileNotFoundError as error:  # It has no classes, or one of them no images.
        unpack = "; unpack each nNNNNNNNN.tar into a folder of its name" * any(
            folder.glob("n*.tar")
        )
        raise ValueError(f"{folder} is no tree of CLASS/IMAGE: {error}{unpack}") from error
    return _Tree(tree), np.array(tree.targets), tuple(tree.classes)


def _read_flat(data: Path, images: list[Path]) -> tuple[Any, Any, tuple[str, ...]]:
    """Read ImageNet's validation images, whose classes stand in another file.

    Raises:
        ValueError: that file is missing, damaged, or lacks some of the images.
    """
    kaggle, devkit = data / "LOC_val_solution.csv", data / "ILSVRC2012_devkit_t12" / "data"
    try:
        if kaggle.is_file():
            class_of = _kaggle_truth(kaggle)
        elif devkit.is_dir():
            class_of = _devkit_truth(devkit)
        else:
            raise ValueError(
                f"{images[0].parent} has no folders of classes, and neither {kaggle} nor {devkit} "
                "says its images' classes; add one of them"
            )
        found = [class_of[image.stem] for image in images]
    except KeyError as error:
        raise ValueError(f"{data} names no class of the image {error}") from error
    classes = tuple(sorted(set(class_of.values())))
    number = {name: index for index, name in enumerate(classes)}
    return _Files(tuple(images)), np.array([number[name] for name in found]), classes


def _kaggle_truth(path: Path) -> dict[str, str]:
    """Return each image's class: a line has its name, and "CLASS x y x y", a box or several."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if row][1:]
    if not rows or any(len(row) != 2 or not row[1].split() for row in rows):
        raise ValueError(f"{path} is no LOC_val_solution.csv of ImageId,PredictionString")
    return {image: boxes.split()[0] for image, boxes in rows}


def _devkit_truth(folder: Path) -> dict[str, str]:
    """Return the class of each image: line n of a text is that of image n, a number in meta.mat.

    A meta.mat holds arrays and texts alone; reading one runs nothing.
    """
    from scipy.io import loadmat  # Heavy, and needed for this file alone.

    truth, meta = folder / "ILSVRC2012_validation_ground_truth.txt", folder / "meta.mat"
    try:
        synsets = loadmat(str(meta), squeeze_me=True)["synsets"]
        wnid = {int(one["ILSVRC2012_ID"]): str(one["WNID"]) for one in np.atleast_1d(synsets)}
        numbers = [int(line) for line in truth.read_text(encoding="ascii").split()]
        return {f"ILSVRC2012_val_{n:08d}": wnid[one] for n, one in enumerate(numbers, start=1)}
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{folder} is not ILSVRC2012's devkit ({error!r})") from error


def _read_hub(name: str, split: str) -> tuple[Any, Any, tuple[str, ...]]:
    from datasets import load_dataset  # Heavy, and not needed for files.

    found, image, label, evaluation = _HUB[name]
    dataset = load_dataset(found, split="train" if split == "train" else evaluation)
    classes = tuple(dataset.features[label].names)
    return _Column(dataset, image), np.asarray(dataset[label], np.int64), classes


def _read_cifar(name: str, path: Path, split: str, *, num_classes: int) -> tuple[Any, Any]:
    """Read an npz file, or the Python version, whose files torchvision knows by their hashes.

    Raises:
        ValueError: the folder does not hold the published files.
    """
    if path.suffix == ".npz":
        images, labels = _read_npz(path, split, num_classes)
        if split == "train":
            _refuse_other_labels(name, path, labels)
        return images, labels
    try:
        found = CIFARS[name](path, train=split == "train")
    except RuntimeError as error:
        raise ValueError(
            f"{path} does not hold the files of {name}'s Python version as they are published; "
            f"give the folder in which {CIFARS[name].base_folder} is, or an npz file"
        ) from error
    return found.data, np.asarray(found.targets, np.int64)


def _refuse_other_labels(name: str, path: Path, labels: Any) -> None:
    """Refuse another data set's file, whose labels are all in range."""
    for num_classes, whose in _OTHER_LABELS.get(name, {}).items():
        if len(labels) and labels.max() < num_classes:
            raise ValueError(
                f"{path}: its labels of train are 0 to {labels.max()}, which look like {whose}, "
                f"but {name} has {NUM_CLASSES[name]} classes; give --dataset "
                f"{'cifar10' if num_classes == 10 else name}, and its file"
            )


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
    labels = arrays.pop(name).reshape(-1)
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: {name} are {labels.dtype}; give whole numbers")
    labels = labels.astype(np.int64)
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
    tree: ImageTree

    def __getitem__(self, index: int) -> Image.Image:
        image: Image.Image = self.tree[index][0]
        return image


@dataclass(frozen=True)
class _Files:
    paths: tuple[Path, ...]

    def __getitem__(self, index: int) -> Image.Image:
        return Image.open(self.paths[index])


@dataclass(frozen=True)
class _Column:
    dataset: Any
    name: str

    def __getitem__(self, index: int) -> Image.Image:
        image: Image.Image = self.dataset[index][self.name]
        return image


@dataclass(frozen=True)
class _Chosen:
    """Read some images of all."""

    images: Any
    chosen: Any

    def __getitem__(self, index: int) -> Any:
        return self.images[int(self.chosen[index])]

"""Prove that images are read as their files, or the hub, have them, and odd ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import timm
from PIL import Image
from scipy.io import savemat

from experiments.tasks.image_files import read_split
from experiments.tasks.images import ImageSource, build_vit, image_workload, transforms
from pipetransformer.checkpoint import write_model_folder

SOURCE = ImageSource("test_vit", None, False, None, 32, False, 0, None, None, 0)


@pytest.mark.parametrize(
    ("name", "found", "columns", "evaluation"),
    [
        ("cifar10", "uoft-cs/cifar10", ("img", "label"), "test"),
        ("cifar100", "uoft-cs/cifar100", ("img", "fine_label"), "test"),
        ("imagenet", "ILSVRC/imagenet-1k", ("image", "label"), "validation"),
    ],
)
def test_without_files_images_come_from_the_hub(
    name: str,
    found: str,
    columns: tuple[str, str],
    evaluation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    classes = datasets.ClassLabel(names=["cat", "dog", "eel"])
    image, label = columns

    def load(asked: str, *, split: str) -> datasets.Dataset:
        assert asked == found and split in ("train", evaluation)
        colours = [0, 100, 200] if split == "train" else [50]
        return datasets.Dataset.from_dict(
            {
                image: [Image.new("RGB", (32, 32), (one, one, one)) for one in colours],
                label: list(range(len(colours))),
            },
            features=datasets.Features({image: datasets.Image(), label: classes}),
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    workload = image_workload(name, SOURCE)
    brightness = {y: float(x.mean()) for x, y in map(workload.train_dataset.__getitem__, range(3))}
    assert sorted(brightness, key=brightness.__getitem__) == [0, 1, 2]
    assert len(workload.eval_dataset) == 1
    model: Any = workload.build(False)
    assert model.num_classes == 3


def write_npz(path: Path, labels: Any) -> str:
    images = np.zeros((len(labels), 8, 8, 3), np.uint8)
    np.savez(path, train_data=images, train_labels=labels)
    return str(path)


def test_labels_that_are_no_whole_numbers_are_refused(tmp_path: Path) -> None:
    # They were cut off: 0.9 was class 0.
    path = write_npz(tmp_path / "one.npz", np.array([0.9, 1.0]))
    with pytest.raises(ValueError, match="train_labels are float64; give whole numbers"):
        read_split("cifar10", path, "train", None)
    path = write_npz(tmp_path / "two.npz", np.array([1]))
    assert read_split("cifar10", path, "train", None).labels.tolist() == [1]


def test_a_split_without_images_is_refused(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "none.npz", np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="none.npz has no images of train"):
        read_split("cifar10", path, "train", None)


@pytest.mark.parametrize(
    ("classes", "message"),
    [(10, r"0 to 9, .* cifar10's, but cifar100 has 100 .*--dataset cifar10,"), (20, "coarse")],
)
def test_another_data_set_s_file_is_refused_though_its_labels_are_in_range(
    tmp_path: Path, classes: int, message: str
) -> None:
    # CIFAR-10 trained under --dataset cifar100, with a head of which nine tenths are for nothing.
    path = write_npz(tmp_path / "one.npz", np.arange(3 * classes) % classes)
    with pytest.raises(ValueError, match=message):
        read_split("cifar100", path, "train", None)
    if classes == 10:
        assert len(read_split("cifar10", path, "train", None).labels) == 30


def test_what_programs_hide_in_a_tree_is_neither_a_class_nor_an_image(tmp_path: Path) -> None:
    # .ipynb_checkpoints became class 0, and moved all others up.
    image = Image.new("RGB", (8, 8))
    for name in (".ipynb_checkpoints", "__MACOSX", "cat", "cat/.ipynb_checkpoints", "dog"):
        for part in ("train", "val"):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            image.save(folder / "one.PNG")
            image.save(folder / "._one.png")
            (folder / "notes.txt").touch()
    split = read_split("imagenet", str(tmp_path), "train", None)
    assert split.classes == ("cat", "dog")
    assert sorted(split.labels) == [0, 1]
    assert split.encoded[0].size == (8, 8)


def test_a_tree_of_hidden_folders_alone_has_no_classes(tmp_path: Path) -> None:
    (tmp_path / "train" / ".cache").mkdir(parents=True)
    with pytest.raises(ValueError, match="train is no tree of CLASS/IMAGE: it has no folders of"):
        read_split("imagenet", str(tmp_path), "train", None)


def test_an_image_of_parts_of_patches_is_refused() -> None:
    # Its last row of pixels would have been left out.
    with pytest.raises(ValueError, match="--image_size is 33, no multiple of the 16 pixels"):
        transforms(replace(SOURCE, pixels=33), whole=True)


def test_a_saved_model_says_that_images_were_seen_whole(tmp_path: Path) -> None:
    model: Any = build_vit(SOURCE, 3, small=False, whole=True)
    write_model_folder(model, model.state_dict(), tmp_path, None)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    config = timm.data.resolve_model_data_config(loaded)
    assert (config["crop_pct"], config["crop_mode"]) == (1.0, "squash")


CLASSES = ("n01440764", "n01443537", "n02102040")


def write_imagenet(data: Path, *, root: str = "") -> None:
    """Write train/CLASS/IMAGE and a flat val/, as ImageNet's archives are unpacked."""
    for number, name in enumerate(CLASSES):
        folder = data / root / "train" / name
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8), (80 * number,) * 3).save(folder / f"{name}_1.JPEG")
    (data / root / "val").mkdir()
    for image, number in ((1, 2), (2, 0), (3, 1), (4, 2)):
        path = data / root / "val" / f"ILSVRC2012_val_{image:08d}.JPEG"
        Image.new("RGB", (8, 8), (80 * number,) * 3).save(path)


def write_kaggle(data: Path) -> None:
    lines = [f"ILSVRC2012_val_{n:08d},{CLASSES[c]} 1 2 3 4 " for n, c in ((3, 1), (1, 2), (2, 0))]
    lines.append(f"ILSVRC2012_val_00000004,{CLASSES[2]} 1 2 3 4 {CLASSES[2]} 5 6 7 8 ")
    (data / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *lines]))


def write_devkit(data: Path) -> None:
    folder = data / "ILSVRC2012_devkit_t12" / "data"
    folder.mkdir(parents=True)
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("num_children", "O")]
    # Numbers are not in the order of names; groups of classes come last.
    rows = [(1, CLASSES[2], 0), (2, CLASSES[0], 0), (3, CLASSES[1], 0), (4, "n00001740", 3)]
    savemat(folder / "meta.mat", {"synsets": np.array(rows, dtype=kinds)})
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n2\n3\n1\n")


@pytest.mark.parametrize("root", ["", "ILSVRC/Data/CLS-LOC"])
@pytest.mark.parametrize("write_truth", [write_kaggle, write_devkit])
def test_imagenet_is_read_as_it_is_distributed(
    tmp_path: Path, write_truth: Callable[[Path], None], root: str
) -> None:
    write_imagenet(tmp_path, root=root)
    with pytest.raises(ValueError, match="says its images' classes; add one of them"):
        read_split("imagenet", str(tmp_path), "test", None)
    write_truth(tmp_path)
    for split, num in (("train", 3), ("test", 4)):
        found = read_split("imagenet", str(tmp_path), split, None)
        assert found.classes == CLASSES and len(found.labels) == num
        for index, label in enumerate(found.labels):
            assert found.encoded[index].getpixel((0, 0))[0] == pytest.approx(80 * label, abs=3)


def test_truth_that_is_damaged_is_named(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    write_devkit(tmp_path)
    truth = tmp_path / "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
    truth.write_text("1\n2\n3\n")
    with pytest.raises(ValueError, match="names no class of the image 'ILSVRC2012_val_00000004'"):
        read_split("imagenet", str(tmp_path), "test", None)
    truth.write_text("1\n2\n3\n9\n")
    with pytest.raises(ValueError, match=r"is not ILSVRC2012's devkit \(KeyError\(9\)\)"):
        read_split("imagenet", str(tmp_path), "test", None)
    (tmp_path / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nsome,\n")
    with pytest.raises(ValueError, match="is no LOC_val_solution.csv"):
        read_split("imagenet", str(tmp_path), "test", None)


def test_archives_within_the_train_archive_are_to_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "n01440764.tar").touch()
    with pytest.raises(ValueError, match="unpack each nNNNNNNNN.tar into a folder of its name"):
        read_split("imagenet", str(tmp_path), "train", None)

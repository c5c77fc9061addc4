"""Fine-tune a ViT on CIFAR or on a tree of images: elastically, or as one of its rivals.

    python -m experiments.vit --dataset cifar10 --data cifar10_jpeg.npz \\
        --model_name_or_path vit_small_patch14_dinov2 --weights model.safetensors \\
        --image_size 56 --freeze schedule:0,4,8,8 --output_dir runs/cifar10
    torchrun --nproc-per-node=8 -m experiments.vit --dataset imagenet --data ILSVRC ...
    python -m experiments.vit --dataset cifar10 --smoke --output_dir runs/smoke

Without --data the data set is downloaded from the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.finetune.baselines import KEEPS
from experiments.finetune.options import RunOptions, check_least, option
from experiments.finetune.script import run
from experiments.finetune.usage import start
from experiments.tasks.image_files import CIFARS, NUM_CLASSES
from experiments.tasks.images import ImageSource, image_workload
from experiments.tasks.smoke import make_cifar, make_tree, smoke_folder
from experiments.tasks.workload import Workload


@dataclass
class ImageOptions:
    """Hold what is fine-tuned on which images."""

    dataset: Literal["cifar10", "cifar100", "imagenet"] = option(
        "cifar10", "CIFAR is a file or a folder; imagenet any tree of train/CLASS and val/CLASS"
    )
    data: str | None = option(None, "the file or the folder; the hub's data set by default")
    model_name_or_path: str = option(
        "vit_base_patch16_224", "timm's name, also hf-hub:NAME and local-dir:FOLDER"
    )
    weights: str | None = option(None, "a safetensors file of such a model; timm's by default")
    image_size: int | None = option(None, "pixels of an image's edge; the model's own by default")
    augment: bool = option(False, "crop and flip training images at random")
    cache_views: int = option(
        4, "with --augment: fixed views of each image; 0 takes new ones each epoch, uncached"
    )
    max_train_samples: int | None = option(None, "images, chosen at random; all by default")
    max_eval_samples: int | None = option(None, "of the evaluation set")

    def check(self, options: RunOptions) -> None:
        """Refuse views that cannot be, and numbers that mean nothing."""
        check_least(self, 1, "image_size", "max_train_samples", "max_eval_samples")
        if self.cache_views < 0 or (self.cache_views != 4 and not self.augment):
            raise ValueError(f"--cache_views is {self.cache_views}; give 0 or more, and --augment")
        if self.augment and not self.cache_views and options.baseline == KEEPS:
            raise ValueError(
                f"--baseline {KEEPS} would keep crops that never come again; leave it out"
            )


def workload_of(run_options: RunOptions, options: ImageOptions) -> Workload:
    """Read what is fine-tuned.

    Raises:
        ValueError: the data or the model are not what was named.
    """
    data, model, size = options.data, options.model_name_or_path, options.image_size
    if run_options.smoke:
        folder = smoke_folder(run_options.output_dir)
        model = "vit_tiny_patch16_224"
        if options.dataset in CIFARS:
            path, num_classes = folder / f"{options.dataset}.npz", NUM_CLASSES[options.dataset]
            data = str(make_cifar(path, num_classes=num_classes))
        else:
            data = str(make_tree(folder / "images"))
    source = ImageSource(
        model,
        None if run_options.smoke else options.weights,
        not run_options.smoke,
        data,
        size,
        options.augment,
        options.cache_views,
        options.max_train_samples,
        options.max_eval_samples,
        run_options.seed,
    )
    return image_workload(options.dataset, source)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune as asked."""
    run(ImageOptions, workload_of, arguments)


if __name__ == "__main__":
    start(main)

"""Fine-tune a timm ViT on one process, one node or many: the script that every process runs.

    python -m experiments.cluster.train_vit --folder runs/vit                # one process
    torchrun --nproc-per-node=4 -m experiments.cluster.train_vit ...         # one node
    sbatch experiments/cluster/slurm.sh -m experiments.cluster.train_vit ... # several, with Slurm
    experiments/cluster/ssh.sh hosts 4 -m experiments.cluster.train_vit ...  # several, with ssh

Without --images it trains a small ViT on scikit-learn's scans of digits, which needs no network.
Started again with the same folder it continues where it was, on however many nodes.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from experiments.tasks.image_files import ImageTree
from pipetransformer import FreezeSchedule, Trainer, adamw, cosine_with_warmup
from pipetransformer.demo import build_model, load_digits_split
from pipetransformer.feed import SizedDataset

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """Hold a model, and the data it is trained and evaluated on."""

    model: nn.Module
    train_dataset: SizedDataset
    eval_dataset: SizedDataset


def digits(seed: int) -> Problem:
    """Build a ViT of 12 blocks for 1,184 scans of digits."""
    return Problem(build_model(10, seed, num_blocks=12), *load_digits_split())


def images(folder: Path, name: str, *, weights: Path | None, seed: int) -> Problem:
    """Build a timm ViT for a folder with train/<class>/<image> and val/<class>/<image>.

    Every image is read in one fixed way, so that the frozen prefix's activations can be cached.

    Args:
        folder: every node reads it under this path.
        name: timm's, for instance vit_base_patch16_224.
        weights: pretrained weights in timm's format; None starts from random ones.
        seed: of the weights that are not pretrained.
    """
    torch.manual_seed(seed)
    num_classes = len(ImageTree(folder / "train").classes)
    model = timm.create_model(
        name,
        pretrained=weights is not None,
        num_classes=num_classes,
        pretrained_cfg_overlay={"file": str(weights)} if weights else None,
    )
    transform = _transform(timm.data.resolve_model_data_config(model))
    return Problem(
        model, ImageTree(folder / "train", transform), ImageTree(folder / "val", transform)
    )


def _transform(data_config: dict[str, Any]) -> Callable[[Any], Tensor]:
    size = data_config["input_size"][-1]
    transform: Callable[[Any], Tensor] = v2.Compose(
        [
            v2.ToImage(),
            v2.Resize(size),
            v2.CenterCrop(size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(data_config["mean"], data_config["std"]),
        ]
    )
    return transform


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="records and checkpoints; all nodes share it"
    )
    parser.add_argument("--images", type=Path, help="a folder with train/ and val/")
    parser.add_argument("--model", default="vit_base_patch16_224", help="timm name, for --images")
    parser.add_argument("--weights", type=Path, help="pretrained weights, for --images")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of all nodes together")
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument(
        "--frozen",
        type=int,
        nargs="+",
        default=[0, 0, 0, 4, 4, 6, 6, 8],
        help="frozen layers by epoch; the last number holds on",
    )
    parser.add_argument("--length", type=int, help="stages of a pipeline; default: the planner's")
    parser.add_argument("--checkpoint-every-steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the model and what it reached into the folder."""
    options = parse(arguments)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    if options.images is None:
        problem = digits(options.seed)
    else:
        problem = images(options.images, options.model, weights=options.weights, seed=options.seed)
    with Trainer(
        problem.model,
        problem.train_dataset,
        eval_dataset=problem.eval_dataset,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=adamw(options.learning_rate),
        freeze=FreezeSchedule(options.frozen),
        learning_rate_schedule=cosine_with_warmup(),
        max_grad_norm=1.0,
        epochs=options.epochs,
        global_batch_size=options.batch_size,
        seed=options.seed,
        pipeline_length=options.length,
        folder=options.folder,
        checkpoint_every_steps=options.checkpoint_every_steps,
        resume="auto",
    ) as trainer:
        report = trainer.fit()
        trainer.save_model(options.folder / "model.safetensors")
        if trainer.world.is_main:
            _LOGGER.info(
                "%d processes, %.0f s of training: %s",
                trainer.world.size,
                report.seconds,
                report.metrics,
            )


if __name__ == "__main__":
    main()

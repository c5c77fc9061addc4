"""Fine-tune a ViT of timm on a folder of images; its lower blocks freeze from the second epoch.

    python examples/images.py photos            # photos/train/<class>/<image>, photos/val/...
    python examples/images.py photos --views 4  # random crops and flips, four of each image

A random view would be computed anew in each epoch. Fixed ones are kept.
"""

import argparse

import timm
import torch
from timm.data import create_transform, resolve_model_data_config
from torch.nn import CrossEntropyLoss
from torchvision.datasets import ImageFolder

from pipetransformer import FitReport, Trainer, adamw


def main(arguments: list[str] | None = None) -> FitReport:
    parser = argparse.ArgumentParser()
    parser.add_argument("data_dir", help="with folders train and val, a folder for each class")
    parser.add_argument("--model", default="vit_small_patch16_224", help="a name of timm")
    parser.add_argument("--pretrained", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--views", type=int, help="random views of each image; else one fixed")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--freeze", default="schedule:0,6", help="blocks by epoch, or a policy")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", default="runs/images")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)  # of the new head
    classes = len(ImageFolder(f"{args.data_dir}/train").classes)
    model = timm.create_model(args.model, pretrained=args.pretrained, num_classes=classes)
    config = resolve_model_data_config(model)
    fixed = create_transform(**config)
    seen = create_transform(**config, is_training=True) if args.views else fixed

    with Trainer(
        model, ImageFolder(f"{args.data_dir}/train", seen),
        eval_dataset=ImageFolder(f"{args.data_dir}/val", fixed), loss_fn=CrossEntropyLoss(),
        optimizer=adamw(args.lr, weight_decay=0.05), learning_rate_schedule="cosine", warmup=0.1,
        epochs=args.epochs, global_batch_size=args.batch_size, num_workers=args.workers,
        freeze=args.freeze, cache_views=args.views, folder=args.output, resume="replace",
    ) as trainer:  # fmt: skip
        report = trainer.fit()
        trainer.save_model(f"{args.output}/model.safetensors")
        if trainer.is_main_process:
            print(report)
        return report


if __name__ == "__main__":
    main()

"""Train LoRA in the language model of a LLaVA; its frozen vision tower sees each image once.

    python examples/vision_language.py

Model and data are small and made here. Have `build` and `samples` return yours.
"""

import argparse
import time
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

import pipetransformer as pt


def build() -> Any:
    hf.set_seed(0)  # The same weights, and the same order of samples, in both trainings.
    images = {"hidden_size": 192, "intermediate_size": 768, "image_size": 64, "patch_size": 8}
    texts = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 16}
    config = hf.LlavaConfig(vision_config=images, text_config=texts, image_token_index=1)
    model = hf.LlavaForConditionalGeneration(config)
    return get_peft_model(model, LoraConfig(target_modules=r".*language_model.*_proj"))


def samples(num: int) -> Any:
    images = torch.randn(8, 3, 1, 1).repeat(num // 8, 1, 64, 64) + torch.randn(num, 3, 64, 64)
    texts = torch.tensor([[1] * 64 + [2, 3 + index % 8] for index in range(num)])  # 64 patches.
    rows = [{"input_ids": text, "labels": text.where(text > 2, -100)} for text in texts]
    return [{**row, "pixel_values": image} for row, image in zip(rows, images, strict=True)]


def train(model: Any, loader: Any, batches: Any = iter) -> torch.Tensor:
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(4):
        start = time.perf_counter()
        for batch in batches(loader):
            losses.append(model(**batch).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {losses[-1]:.3f}, {time.perf_counter() - start:.1f} s")
    return torch.stack(losses)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_samples", type=int, default=128)
    loader = DataLoader(samples(parser.parse_args(arguments).num_samples), 16, shuffle=True)
    plain, model = train(build(), loader), build()
    with pt.attach(model, parts=[model.model.model.vision_tower]) as cached:
        change = (train(model, loader, cached.epoch) - plain).abs().max()
    print(f"{cached.stats.hits} images' rows read in epoch 3; losses differ by {change:.1e}")


if __name__ == "__main__":
    main()

"""Try learning rates in a plain PyTorch loop; the frozen blocks run for the first one only.

python examples/own_loop.py --train_file train.tsv --learning_rates 3e-5 1e-4 3e-4
"""

import argparse
import csv
import time
from typing import Any

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer, set_seed

import pipetransformer as pt


def answer(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    return model(**{name: one.to(model.device) for name, one in batch.items()})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", default="bert-base-uncased")
    parser.add_argument("--train_file", required=True, help="tsv with sentence and label")
    parser.add_argument("--learning_rates", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4])
    parser.add_argument("--freeze", type=int, default=8, help="frozen blocks")
    parser.add_argument("--cache_folder", default="runs/rows", help="later runs read it, too")
    args = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    tabs = {"sep": "\t", "quoting": csv.QUOTE_NONE}
    data = load_dataset("csv", data_files=args.train_file, split="train", **tabs)
    size = {"truncation": True, "padding": "max_length", "max_length": 64}
    data = data.map(lambda row: {**tokenizer(row["sentence"], **size), "labels": row["label"]})
    data = data.with_format("torch", columns=["input_ids", "attention_mask", "labels"])
    data = data.train_test_split(0.2, seed=0)
    for rate in args.learning_rates:
        set_seed(0)
        start = time.perf_counter()
        model = Classifier.from_pretrained(args.model_name_or_path)
        model.to("cuda" if torch.cuda.is_available() else "cpu").train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        rows = {"cache_folder": args.cache_folder, "cache_keep": True}
        with pt.attach(model, freeze=args.freeze, **rows) as cached:
            for batch in cached.epoch(DataLoader(data["train"], 32, shuffle=True)):
                answer(model, batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        seconds, unseen = time.perf_counter() - start, data["test"][:500]
        with torch.no_grad():
            found = answer(model.eval(), unseen).logits.argmax(1).cpu()
        right = (found == unseen["labels"]).float().mean()
        print(f"{rate}: {right:.1%} right, {cached.stats.hits} rows read, {seconds:.0f} s")


if __name__ == "__main__":
    main()

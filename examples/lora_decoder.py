"""Train LoRA in the upper half of a decoder; what its lower half returns is kept from epoch 1 on.

    python examples/lora_decoder.py --train_file book.txt
    python examples/lora_decoder.py --train_file book.txt --model_name_or_path Qwen/Qwen3-0.6B

The base is frozen, so the lower half returns the same in every epoch. It runs in the first alone.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from pipetransformer import FitReport, Trainer, adamw


def main(arguments: list[str] | None = None) -> FitReport:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", default="gpt2")
    parser.add_argument("--train_file", required=True, help="a text")
    parser.add_argument("--block_size", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--max_train_samples", type=int)
    parser.add_argument("--lora_r", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--output_dir", default="runs/lora")
    args = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    ids = tokenizer(Path(args.train_file).read_text(encoding="utf-8"))["input_ids"]
    starts = range(0, len(ids) - args.block_size + 1, args.block_size)[: args.max_train_samples]
    blocks = [ids[start : start + args.block_size] for start in starts]
    data = Dataset.from_dict({"input_ids": blocks, "labels": blocks}).with_format("torch")
    data = data.train_test_split(0.1, seed=0)

    set_seed(0)  # of the adapters
    base = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    depth = base.config.num_hidden_layers
    upper = list(range(depth // 2, depth))
    lora = LoraConfig(task_type="CAUSAL_LM", r=args.lora_r, layers_to_transform=upper)
    with Trainer(
        get_peft_model(base, lora), data["train"], eval_dataset=data["test"],
        optimizer=adamw(args.learning_rate), learning_rate_schedule="cosine", warmup=0.1,
        epochs=args.num_train_epochs, global_batch_size=8, freeze=f"schedule:{depth // 2}",
        folder=args.output_dir, resume="replace",
    ) as trainer:  # fmt: skip
        before = trainer.evaluate()["loss"]
        report = trainer.fit()
        trainer.save_pretrained(f"{args.output_dir}/adapter")
        if trainer.is_main_process:
            print(report)
            print(f"loss on unseen text: {before:.3f}, and {report.metrics['loss']:.3f} after it")
        return report


if __name__ == "__main__":
    main()

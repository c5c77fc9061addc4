"""Fine-tune a decoder on the processes of several nodes; stop, and go on with fewer or more.

    python examples/several_nodes.py book.txt                            # one process
    torchrun --nproc-per-node=4 examples/several_nodes.py book.txt       # all of a machine
    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=4 --master-addr=node0 --master-port=29500 \\
        --max-restarts=3 examples/several_nodes.py book.txt --output_dir /shared/run

The last one runs on each node, with its own rank. All nodes see the folder. Started again with
the same folder, it goes on where the newest checkpoint is.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipetransformer import FitReport, Trainer, adamw


def main(arguments: list[str] | None = None) -> FitReport:
    parser = argparse.ArgumentParser()
    parser.add_argument("train_file", help="a text")
    parser.add_argument("--model_name_or_path", default="gpt2")
    parser.add_argument("--block_size", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--learning_rate", type=float, default=3e-5)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--global_batch_size", type=int, default=32, help="of all nodes together")
    parser.add_argument("--output_dir", default="runs/nodes", help="all nodes share it")
    args = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    ids = tokenizer(Path(args.train_file).read_text(encoding="utf-8"))["input_ids"]
    starts = range(0, len(ids) - args.block_size + 1, args.block_size)
    blocks = [ids[start : start + args.block_size] for start in starts]
    data = Dataset.from_dict({"input_ids": blocks, "labels": blocks}).with_format("torch")

    with Trainer(
        AutoModelForCausalLM.from_pretrained(args.model_name_or_path), data,
        optimizer=adamw(args.learning_rate), learning_rate_schedule="cosine", warmup=0.1,
        epochs=args.num_train_epochs, global_batch_size=args.global_batch_size, freeze="linear",
        tied_weights="freeze", folder=args.output_dir, checkpoint_every_steps=100, resume="auto",
    ) as trainer:  # fmt: skip
        trainer.begin()
        if trainer.is_main_process:
            print(f"from step {trainer.global_step} on {trainer.world.size} processes")
        report = trainer.fit()
        trainer.save_pretrained(f"{args.output_dir}/model")
        if trainer.is_main_process:
            print(report)
        return report


if __name__ == "__main__":
    main()

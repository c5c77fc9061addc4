"""Fine-tune BERT on a task of GLUE, or on texts of your own, while its lower layers freeze.

python examples/glue.py --task_name sst2
torchrun --nproc-per-node=2 examples/glue.py --data_files train.tsv dev.tsv
"""

import argparse
import csv

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer, DataCollatorWithPadding, set_seed

from pipetransformer import FitReport, Trainer, adamw

TASKS = ("cola", "mrpc", "qnli", "qqp", "rte", "sst2")


def main(arguments: list[str] | None = None) -> FitReport:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", default="bert-base-uncased")
    parser.add_argument("--task_name", default="sst2", choices=TASKS)
    parser.add_argument("--data_files", nargs=2, help="csv or tsv: label from 0 on, and texts")
    parser.add_argument("--max_train_samples", type=int)
    parser.add_argument("--learning_rate", type=float, default=3e-5)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--freeze", default="schedule:0,4", help="layers by epoch, or a policy")
    parser.add_argument("--output_dir", default="runs/glue")
    args = parser.parse_args(arguments)

    if args.data_files:
        train, validation = args.data_files
        # Quotation marks of a tsv are part of its texts.
        tabs = {"sep": "\t", "quoting": csv.QUOTE_NONE} if train.endswith("tsv") else {}
        data = load_dataset("csv", data_files={"train": train, "validation": validation}, **tabs)
    else:
        data = load_dataset("nyu-mll/glue", args.task_name)
    if args.max_train_samples:
        data["train"] = data["train"].shuffle(seed=0).select(range(args.max_train_samples))
    texts = [name for name in data["train"].column_names if name not in ("label", "idx")]
    classes = len(data["train"].unique("label"))
    set_seed(0)  # of the new head
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = Classifier.from_pretrained(args.model_name_or_path, num_labels=classes)
    data = data.map(lambda row: tokenizer(*(row[name] for name in texts), truncation=True))
    with Trainer(
        model, data["train"], eval_dataset=data["validation"], epochs=args.num_train_epochs,
        optimizer=adamw(args.learning_rate), learning_rate_schedule="linear", warmup=0.1,
        global_batch_size=32, collate_fn=DataCollatorWithPadding(tokenizer), freeze=args.freeze,
        folder=args.output_dir, resume="replace",
    ) as trainer:  # fmt: skip
        report = trainer.fit()
        trainer.save_pretrained(f"{args.output_dir}/model")
        if trainer.is_main_process:
            print(report)
        return report


if __name__ == "__main__":
    main()

"""Train LoRA in a decoder's upper third by TRL; what its lower two thirds return is computed once.

    python examples/lora_llama.py --train_file texts.txt
    python examples/lora_llama.py --train_file texts.txt --model_name_or_path Qwen/Qwen3-0.6B

The file has a text in each line. The callback is all that a script of TRL needs in addition.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from pipetransformer import FreezeCallback


def main(arguments: list[str] | None = None) -> tuple[SFTTrainer, FreezeCallback]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", default="HuggingFaceTB/SmolLM2-135M")
    parser.add_argument("--train_file", required=True, help="a text in each line")
    parser.add_argument("--max_length", type=int, default=512, help="tokens of a packed sample")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--lora_r", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--output_dir", default="runs/lora")
    args = parser.parse_args(arguments)

    texts = Path(args.train_file).read_text(encoding="utf-8").splitlines()
    data = Dataset.from_dict({"text": texts}).train_test_split(0.1, seed=0)

    set_seed(0)  # of the adapters
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    depth = model.config.num_hidden_layers
    lower = 2 * depth // 3
    lora = LoraConfig(r=args.lora_r, layers_to_transform=list(range(lower, depth)))
    rows = FreezeCallback(freeze=lower)
    settings = SFTConfig(
        args.output_dir, max_length=args.max_length, packing=True, bf16=args.bf16,
        per_device_train_batch_size=args.batch_size, num_train_epochs=args.num_train_epochs,
        learning_rate=args.learning_rate, eval_strategy="epoch", logging_steps=1, report_to=[],
    )  # fmt: skip
    trainer = SFTTrainer(
        model, settings, train_dataset=data["train"], eval_dataset=data["test"],
        peft_config=lora, callbacks=[rows],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(f"{args.output_dir}/adapter")
    print(f"{lower} of {depth} blocks are frozen; {rows.stats.hits} rows were read")
    return trainer, rows


if __name__ == "__main__":
    main()

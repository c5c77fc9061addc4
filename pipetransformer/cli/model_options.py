"""Read from the command line which model is meant."""

from __future__ import annotations

import argparse

from pipetransformer.cli.configured_model import USUAL_TOKENS
from pipetransformer.cli.lora import Lora
from pipetransformer.cli.model_choice import TASKS, ModelChoice
from pipetransformer.cli.named_model import BERTS

MODEL_HELP = (
    "a folder or config.json of transformers, a name of the hub that is in its cache, a model of "
    f"timm, {' or '.join(BERTS)}, or module:function"
)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image-size", type=int, help="pixels of a side, for images")
    parser.add_argument(
        "--seq-length", type=int, help=f"tokens of a sample, for texts; {USUAL_TOKENS} if unsaid"
    )
    parser.add_argument(
        "--task",
        choices=tuple(TASKS),
        help="head of a configuration; else the class that it names",
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA adapters alone")
    parser.add_argument(
        "--lora-targets",
        help="linear layers that get one: q_proj,v_proj; peft's default if unsaid",
    )


def model_choice(options: argparse.Namespace, *, dtype: str = "float32") -> ModelChoice:
    """Return the model that options name.

    Raises:
        ValueError: a value is out of range, or does not apply to the model.
    """
    targets: str | None = options.lora_targets
    if targets is not None and options.lora is None:
        raise ValueError("--lora-targets says where, but not how large; add --lora with a rank")
    names = None if targets is None else tuple(one.strip() for one in targets.split(","))
    lora = None if options.lora is None else Lora(options.lora, names)
    return ModelChoice(
        options.model, options.image_size, options.seq_length, dtype, options.task, lora
    )

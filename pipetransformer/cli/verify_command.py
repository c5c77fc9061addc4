"""Offer `pipetransformer verify`: see whether a model trains here as its own forward does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.cli.configured_model import model_class
from pipetransformer.cli.model_choice import ModelChoice
from pipetransformer.cli.model_options import MODEL_HELP, add_model_options, model_choice
from pipetransformer.cli.named_model import build, named_config
from pipetransformer.cli.smaller_config import smaller
from pipetransformer.model import adapt
from pipetransformer.trainer import Trainer

_TOKENS = 16
"""Of a sample, where nobody asks for more."""
_MOST_PARAMETERS = 50_000_000
"""Of a configuration's model: twins of it are trained in float64."""


def add_verify_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    add_model_options(parser)
    parser.set_defaults(run=run_verify)


def run_verify(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Verify a model of the named class with random weights, on this machine's first device.

    Raises:
        ImportError: the model's package is not installed.
        ValueError: the model cannot be built, is refused, or trains wrongly.
    """
    choice = model_choice(options)
    config, lowered = _small_config(choice)
    built = build(choice, device="cpu", config=config, usual_tokens=_TOKENS)
    batch = dict(built.batch)
    num_samples = min(len(entry) for entry in batch.values())
    samples = [{name: entry[i] for name, entry in batch.items()} for i in range(num_samples)]
    say("\n".join([choice.name, *(f"  assumed: {one}" for one in built.assumed)]))
    if lowered:
        say(f"  in small: {', '.join(lowered)}")
    try:
        model = adapt(built.model, lambda names: batch)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if model.loss_fn is None:
        say("  assumed: the mean square of its output is its loss, as it has none of its own")
    trainer = Trainer(
        model,
        samples,
        loss_fn=_mean_square if model.loss_fn is None else None,
        global_batch_size=num_samples,
        progress=False,
    )
    try:
        found = trainer.verify(batch)
    finally:
        trainer.close()
    how = "found by running it" if model.is_recorded else "by the adapter of its class"
    say(
        f"{len(model.sublayers)} sublayers, {how}; {model.num_layers} layers can freeze\n"
        f"It trains as its own forward does. Outputs, loss, gradients, and {found.num_tensors} "
        f"tensors after each of three steps are equal, in {found.dtype} on {found.num_samples} "
        "samples."
    )


def _mean_square(output: Tensor, target: object) -> Tensor:
    return output.square().mean()


def _small_config(choice: ModelChoice) -> tuple[Any | None, tuple[str, ...]]:
    """Return the configuration to verify, if the model has one, and what was made smaller."""
    config = named_config(choice)
    if config is None:
        return None, ()
    kind, _ = model_class(config, choice)

    def count(one: Any) -> int:
        try:
            with torch.device("meta"):
                model: nn.Module = kind(one)
        except Exception as error:  # Families have rules of their own for their sizes.
            raise ValueError(f"a small {kind.__name__} cannot be built: {error}") from error
        return sum(parameter.numel() for parameter in model.parameters())

    return smaller(config, count, most=_MOST_PARAMETERS)

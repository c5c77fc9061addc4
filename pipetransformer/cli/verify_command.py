"""Offer `pipetransformer verify`: see whether a model trains here as its own forward does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from autopipe.trace import as_bytes
from pipetransformer.cli.named_model import add_model_options, build, build_shapes, model_choice
from pipetransformer.model import adapt
from pipetransformer.trainer import Trainer

_TOKENS = 16
"""Of a sample, where nobody asks for more."""
_BYTES_A_PARAMETER = 100
"""Twins in float64 with their gradients and moments: 94 were measured for bert-base."""


def add_verify_parser(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.set_defaults(run=run_verify)


def run_verify(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Verify a model of the named class with random weights, on this machine's first device.

    Raises:
        ImportError: the model's package is not installed.
        ValueError: the model cannot be built, is refused, or trains wrongly.
    """
    choice = model_choice(options)
    if not choice.is_own:  # Before it is built in full.
        _refuse_large(choice.name, build_shapes(choice).model)
    built = build(choice, device="cpu", usual_tokens=_TOKENS)
    batch = dict(built.batch)
    num_samples = min(len(entry) for entry in batch.values())
    samples = [{name: entry[i] for name, entry in batch.items()} for i in range(num_samples)]
    say("\n".join([choice.name, *(f"  assumed: {sentence}" for sentence in built.assumed)]))
    try:
        model = adapt(built.model, lambda names: batch)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if model.loss_fn is None:
        say("  assumed: the mean square of its output is its loss, as it has none of its own")
    loss_fn = _mean_square if model.loss_fn is None else None
    with Trainer(
        model, samples, loss_fn=loss_fn, global_batch_size=num_samples, progress=False
    ) as trainer:
        result = trainer.verify(batch)
    how = "found by running it" if model.is_recorded else "by the adapter of its class"
    say(
        f"{len(model.sublayers)} sublayers, {how}; {model.num_layers} layers can freeze\n"
        f"It trains as its own forward does. Outputs, loss, gradients, and {result.num_tensors} "
        f"tensors after each of three steps are equal, in {result.dtype} on {result.num_samples} "
        "samples."
    )


def _refuse_large(name: str, model: Any) -> None:
    """Refuse a model whose twins would not fit this machine's memory."""
    needed = _BYTES_A_PARAMETER * sum(parameter.numel() for parameter in model.parameters())
    if needed > (free := _free_bytes()):
        raise ValueError(
            f"verifying {name} takes about {as_bytes(needed)} of memory, and "
            f"{as_bytes(free)} are free; give a config.json with fewer num_hidden_layers"
        )


def _free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def _mean_square(output: Tensor, target: object) -> Tensor:
    return output.square().mean()

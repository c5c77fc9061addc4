"""Offer the demo as `pipetransformer demo`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from pipetransformer.demo import DemoSettings, run_demo


def add_demo_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `pipetransformer demo`."""
    default = DemoSettings()
    parser.add_argument(
        "--folder", default=default.folder, help="where results go; an earlier demo's are replaced"
    )
    parser.add_argument("--epochs", type=int, default=default.epochs, help="of fine-tuning")
    parser.add_argument("--seed", type=int, default=default.seed, help="of weights and order")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace, say: Callable[[str], object]) -> None:
    run_demo(DemoSettings(options.folder, options.epochs, options.seed), say)

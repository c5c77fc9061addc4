"""Offer the framework on the command line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from pipetransformer.demo import DemoSettings, run_demo
from pipetransformer.launch import WorkerFailedError
from pipetransformer.plan_command import add_plan_parser, read_question, run_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the process's exit status."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="pipetransformer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="fine-tune a ViT elastically, as published, and without, and compare"
    )
    demo.add_argument("--folder", default=DemoSettings.folder, help="where results go")
    demo.add_argument("--epochs", type=int, default=DemoSettings.epochs)
    demo.add_argument("--seed", type=int, default=DemoSettings.seed)
    add_plan_parser(
        commands.add_parser(
            "plan", help="say what pipeline a model would get, here or on a described cluster"
        )
    )
    options = parser.parse_args(arguments)
    try:
        if options.command == "plan":
            return 0 if run_plan(read_question(options), print) else 1
        run_demo(
            DemoSettings(folder=options.folder, epochs=options.epochs, seed=options.seed), print
        )
    except (ValueError, WorkerFailedError) as error:
        print(f"pipetransformer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Offer the framework on the command line."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipetransformer import __version__
from pipetransformer.checkpoint import add_export_parser
from pipetransformer.cli.cache_command import add_cache_parser
from pipetransformer.cli.plan_command import add_plan_parser
from pipetransformer.cli.verify_command import add_verify_parser
from pipetransformer.demo import add_demo_parser
from pipetransformer.errors import CorruptCheckpointError, WorkerFailedError
from pipetransformer.report import PAGE_FILE, add_score_parser, write_page


def _add_report_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder= of the run")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace, say: Callable[[str], object]) -> None:
    write_page(options.folder)
    say(str(options.folder / PAGE_FILE))


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "plan": (
        add_plan_parser,
        "say what pipeline a model would get, here or on a described cluster",
    ),
    "verify": (add_verify_parser, "see whether a model trains here as its own forward does"),
    "report": (
        _add_report_parser,
        "draw a run as report.html: loss and metrics, frozen layers, K and R, where the time "
        "went, the cache, decisions and what they saw",
    ),
    "score": (add_score_parser, "say what freeze policies would have frozen in a run, and saved"),
    "export": (add_export_parser, "turn a checkpoint into a folder that other programs load"),
    "cache": (add_cache_parser, "list, check or remove rows that runs have kept"),
    "demo": (
        add_demo_parser,
        "fine-tune a small ViT in a loop, and elastically, in 3.5 minutes",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the process's exit status."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="pipetransformer", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True)
    for name, (add_options, text) in _COMMANDS.items():
        add_options(commands.add_parser(name, help=text))
    options = parser.parse_args(arguments)
    try:
        is_answered = options.run(options, print)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; the flush at exit must not fail on it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CorruptCheckpointError, ImportError, OSError, ValueError, WorkerFailedError) as error:
        print(f"pipetransformer: {error}", file=sys.stderr)
        return 1
    return 1 if is_answered is False else 0

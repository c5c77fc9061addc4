"""Pack what is needed, or run all phases: `python -m experiments.gpu_check --help`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.gpu_check.findings import OK, Setting
from experiments.gpu_check.pack import pack
from experiments.gpu_check.running import Phase, run_phases
from experiments.gpu_check.table import table

_ROOM = "experiments.gpu_check.phases"
_SECONDS = {
    "card": (20, 25),
    "graphs": (120, 40),
    "language": (150, 40),
    "loops": (280, 80),
    "parts": (100, 40),
    "marked_tests": (75, 16),
    "equality": (100, 45),
    "finetuning": (65, 18),
    "pipelines": (60, 50),
    "nccl": (60, 50),
    "tiers": (45, 20),
    "memory": (40, 14),
    "gpipe": (90, 40),
}
"""Of each phase, in the order of their worth, on a GPU and in a rehearsal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; return 0 where every phase has passed."""
    parser = argparse.ArgumentParser(prog="experiments.gpu_check", description=__doc__)
    parser.add_argument("--pack", metavar="FOLDER", help="fill a folder for --data, and end")
    parser.add_argument("--source", metavar="FOLDER", help="of the data sets, for --pack")
    parser.add_argument("--data", metavar="FOLDER", help="of --pack; random data without it")
    parser.add_argument("--out", default="gpu_check", metavar="FOLDER", help="report and traces")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to rehearse")
    parser.add_argument("--seconds", type=float, default=450.0, help="for all phases together")
    parser.add_argument("--only", nargs="+", choices=list(_SECONDS), help="run these phases alone")
    options = parser.parse_args(arguments)
    if (options.pack is None) != (options.source is None):
        parser.error("--pack and --source go together: where to, and where from")
    if options.pack is not None:
        for name, size in pack(Path(options.source), Path(options.pack)).items():
            print(f"{size / 1e6:6.1f} MB  {name}")
        return 0
    if options.data is not None and not Path(options.data).is_dir():
        parser.error(f"--data {options.data} is no folder; fill it by --pack, or leave it out")
    phases = [
        Phase(name, f"{_ROOM}.{name}:run", seconds[options.tiny])
        for name, seconds in _SECONDS.items()
        if options.only is None or name in options.only
    ]
    data = options.data and str(Path(options.data).resolve())
    out = str(Path(options.out).resolve())
    deadline = time.time() + options.seconds
    report = run_phases(phases, Setting(options.device, options.tiny, data, out, "", deadline))
    print(table(report), end="")
    return 0 if all(one["status"] == OK for one in report["phases"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

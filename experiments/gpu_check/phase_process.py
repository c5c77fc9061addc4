"""Run one phase in this process; `running` starts it."""

from __future__ import annotations

import json
import logging
import pkgutil
import sys
from pathlib import Path

from experiments.gpu_check.findings import Findings, Setting


def main(told: str) -> None:
    """Run the phase that is named, and write what it finds where that is told."""
    values = json.loads(told)
    function, found = values.pop("function"), Path(values.pop("found"))
    setting = Setting(**values)
    logging.basicConfig(level=logging.WARNING)
    findings = Findings(found, lambda: setting.left_s)
    pkgutil.resolve_name(function)(findings, setting)
    findings.end()


if __name__ == "__main__":
    main(sys.argv[1])

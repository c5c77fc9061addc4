"""Prove that the commands on the pages of results ask for what their scripts take.

They are run by a shell for which `python` only notes what it is asked for; runs of a series leave
stand-ins, so that the rows that follow from them are asked for, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import bert, compare, compare_policies, vit, when_it_pays
from experiments.ablation import __main__ as ablation_main
from experiments.finetune.options import RunOptions, check, parse
from experiments.finetune.series import Series
from freeze import sealed_line

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("experiments/results/*/README.md"))
OPTIONS: dict[str, Any] = {"bert": bert.TextOptions, "vit": vit.ImageOptions}
SERIES: dict[str, Any] = {
    "compare": compare.main,
    "compare_policies": compare_policies.main,
    "ablation": ablation_main.main,
    "when_it_pays": when_it_pays.main,
}
NOTES = """#!/bin/bash
printf '%s\\0' "$@" > "$NOTED/$$"
"""
ON_A_CORE = '#!/bin/bash\nshift 2\nexec "$@"\n'


def commands(page: Path, folder: Path) -> list[list[str]]:
    """Return what a page's shell blocks ask of python."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    programs, noted = folder / "programs", folder / "noted"
    programs.mkdir()
    texts = {"python": NOTES, "taskset": ON_A_CORE, "cp": "#!/bin/bash\n", "sed": "#!/bin/bash\n"}
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    noted.mkdir()
    for block in blocks:
        subprocess.run(
            ["/bin/bash", "-e", "-c", f"{block}\nwait"],
            cwd=folder,
            env={**os.environ, "PATH": f"{programs}:/usr/bin:/bin", "NOTED": str(noted)},
            check=True,
        )
    # Some commands run side by side.
    return [one.read_text().split("\0")[:-1] for one in sorted(noted.iterdir())]


def leave_a_run(folder: Path) -> None:
    """Write what the table of a series reads, and what other rows repeat."""
    folder.mkdir(parents=True)
    step = {"kind": "step", "step": 0, "epoch": 0, "seconds": 1.0, "frozen": 0}
    step |= {"length": 1, "replicas": 1}
    marks = {"f1": 1.0, "accuracy": 1.0}
    records = [step, {"kind": "epoch", "epoch": 0, "samples_per_s": 1.0}]
    records.append({"kind": "evaluation", "step": 1, **marks})
    (folder / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    metric = "accuracy" if "cifar10" in str(folder) else "f1"
    summary = {"metric": metric, "metrics": marks, "train_s": 1.0, "steps": 10, "details": {}}
    (folder / "summary.json").write_text(json.dumps(summary))
    entry = {"step": 0, "decision": {"num_frozen": 0, "resting": []}}
    (folder / "journal.jsonl").write_bytes(sealed_line(entry))


def refuse_wrong(script: str, arguments: Sequence[str]) -> None:
    """Check a script's options as it does before it reads anything."""
    own, options = parse((OPTIONS[script], RunOptions), arguments)
    check(options)
    own.check(options)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_what_a_page_asks_for_is_taken(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(self: Series, variant: str, seed: int, arguments: Sequence[str]) -> None:
        folder = self._folder_of(variant, seed)
        refuse_wrong(self.script, [*arguments, "--output_dir", str(folder)])
        asked.append(variant)
        leave_a_run(folder)

    monkeypatch.setattr(Series, "_run", run)
    found = commands(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    folders: list[str] = []
    for option, module, *arguments in found:
        assert option == "-m"
        name = module.removeprefix("experiments.")
        if name in OPTIONS:
            refuse_wrong(name, arguments)
            folders.append(arguments[arguments.index("--output_dir") + 1])
        elif name in SERIES and "simulate" not in arguments:
            SERIES[name](arguments)
            folders.append(arguments[arguments.index("--folder") + 1])
        elif name in SERIES:
            ablation_main.parse(arguments)
        else:
            assert (ROOT / f"{module.replace('.', '/')}.py").exists() or (
                ROOT / module.replace(".", "/") / "__main__.py"
            ).exists()
    assert found and len(folders) == len(set(folders)), "two commands share a folder"
    if page.parent.name in ("cifar10", "squad"):
        assert "ddp+freeze+cache" in asked

"""Prove that the wheel alone is what the README promises: installed from it, elsewhere, it works.

The package index is the only network it needs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import pytest

from tests.helpers import tiny_hub
from tests.helpers.layout import PACKAGES
from tests.test_readme import programs

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def run(*command: str | Path, folder: Path) -> str:
    """Run a command without this environment's packages and settings; return what it prints."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "WORLD_SIZE", "RANK")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    ended = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, f"{command}:\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@dataclass(frozen=True)
class Installed:
    """Say where the wheel is, and the environment it is installed in."""

    wheel: Path
    programs: Path
    elsewhere: Path

    def install(self, *extras: str) -> None:
        wanted = f"{self.wheel}[{','.join(extras)}]" if extras else self.wheel
        run(self.programs / "python", "-m", "pip", "install", "-q", wanted, folder=self.elsewhere)

    def run(self, program: str, *arguments: str | Path) -> str:
        return run(self.programs / program, *arguments, folder=self.elsewhere)


@pytest.fixture(scope="module")
def installed() -> Iterator[Installed]:
    """Build the wheel from a copy of the sources, and install it without extras."""
    # Not tmp_path: pytest would keep the environments, of gigabytes each, of its last three runs.
    with TemporaryDirectory() as name:
        folder = Path(name)
        sources, elsewhere = folder / "sources", folder / "elsewhere"
        sources.mkdir()
        elsewhere.mkdir()
        for file in ("README.md", "LICENSE", "setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / file, sources)
        for package in (*PACKAGES, "experiments", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / package, sources / package, ignore=ignored)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, folder=sources)
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "bare", with_pip=True)
        bare = Installed(wheel, folder / "bare" / "bin", elsewhere)
        bare.install()
        yield bare


def test_the_wheel_holds_the_five_packages_and_nothing_else(installed: Installed) -> None:
    with ZipFile(installed.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert names == expected


def test_without_extras_the_library_imports_and_its_command_explains_itself(
    installed: Installed,
) -> None:
    place = installed.run("python", "-c", "import pipetransformer as p; print(p.__file__)")
    assert Path(place).is_relative_to(installed.programs.parent)
    said = installed.run("pipetransformer", "--help")
    assert "plan" in said and "report" in said


def test_without_extras_the_notebook_runs(installed: Installed) -> None:
    runner = shutil.copy(ROOT / "tests/examples/notebook.py", installed.elsewhere)
    held = Path(shutil.copy(ROOT / "examples/freeze_and_cache.ipynb", installed.elsewhere))
    installed.run("python", runner, held)
    assert "losses are equal in every bit" in held.read_text()


def test_with_the_extras_it_names_the_readme_s_first_program_runs(installed: Installed) -> None:
    (extras,) = re.findall(r"`pip install '\.\[([\w,]+)\]'`", (ROOT / "README.md").read_text())
    installed.install(*extras.split(","))
    (installed.elsewhere / "train.py").write_text(programs("README.md")[0])
    hub = shutil.copy(tiny_hub.__file__, installed.elsewhere)
    assert "'accuracy': " in installed.run("python", hub, "train.py")


def test_with_its_extra_the_demo_runs(installed: Installed) -> None:
    installed.install("demo")
    said = installed.run("pipetransformer", "demo", "--epochs", "1", "--folder", "runs/demo")
    assert said.count("layers freeze, elastic") == 2
    written = {path.name for path in (installed.elsewhere / "runs" / "demo").iterdir()}
    assert written >= {"report.html", "summary.json", "model.safetensors"}

"""Prove that a missing optional package is named with the extra that installs it."""

from __future__ import annotations

import configparser
import importlib
import re
import sys
from pathlib import Path

import pytest

from pipetransformer import __version__
from pipetransformer.cli import main
from pipetransformer.extras import _EXTRAS

ROOT = Path(__file__).parents[2]


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Have packages be as if they were not installed."""
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that fails; return the one line it says."""
    capsys.readouterr()
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err.strip()


def test_every_package_is_in_the_extra_that_is_named() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for package, extra in _EXTRAS.items():
        names = re.split(r"[\s>=.\d]+", config["options.extras_require"][extra])
        assert package in names


@pytest.mark.parametrize(
    ("package", "model", "extra"),
    [("timm", "vit_tiny_patch16_224", "vision"), ("transformers", "bert-base", "text")],
)
def test_a_plan_names_the_extra_of_its_model(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    model: str,
    extra: str,
) -> None:
    hide(monkeypatch, package)
    assert refused(capsys, "plan", model, "--slots", "1") == (
        f"pipetransformer: the model {model} needs the package {package}; install "
        f"pipetransformer[{extra}]"
    )


@pytest.mark.parametrize("package", ["timm", "sklearn", "plotly"])
def test_the_demo_names_its_extra_before_it_begins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
) -> None:
    hide(monkeypatch, package)
    text = refused(capsys, "demo", "--folder", str(tmp_path / "demo"))
    assert text.endswith(f"needs the package {package}; install pipetransformer[demo]")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_transformers_interface_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("pipetransformer.hf")]:
        monkeypatch.delitem(sys.modules, name)
    hide(monkeypatch, package)
    text = rf"^pipetransformer.hf needs the package {package}; install pipetransformer\[text\]$"
    with pytest.raises(ImportError, match=text):
        importlib.import_module("pipetransformer.hf")


def test_the_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"pipetransformer {__version__}\n"

"""Count the layout: packages, layers, arrows, lines, and the frames of a batch and a decision.

    python -m experiments.layout

A part is a folder or a module of `pipetransformer`. An arrow is a pair of parts of which one
imports the other; a part's layer is the longest way down from it. Frames are those on the stack
from `Trainer.fit` to where rows of the cache are copied, and to the policy.
"""

from __future__ import annotations

import ast
import inspect
import threading
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils.data import TensorDataset

from autocache import RowStore
from freeze import FreezeContext
from pipetransformer import Trainer

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipetransformer", "freeze", "autopipe", "autodp", "autocache")


def arrows(package: str) -> dict[str, set[str]]:
    """Return which parts of a package each of its parts imports."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / package).rglob("*.py"):
        part = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if part.startswith("__"):
            continue
        found.setdefault(part, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
                found[part].add(str(node.module).split(".")[1])
        found[part].discard(part)
    return found


def layer_of(part: str, below: dict[str, set[str]], above: tuple[str, ...] = ()) -> int:
    """Return how many parts lie on the longest way down, this one included.

    Raises:
        ValueError: parts import each other in a circle.
    """
    if part in above:
        raise ValueError(f"a circle: {' -> '.join((*above, part))}")
    return 1 + max((layer_of(one, below, (*above, part)) for one in below[part]), default=0)


def size_of(folder: Path) -> tuple[int, int]:
    """Return a folder's Python files and their lines."""
    files = list(folder.rglob("*.py"))
    return len(files), sum(len(path.read_text().splitlines()) for path in files)


def _stack(top: str) -> list[str]:
    """Name the functions of ours on the stack, from the outermost of a name on."""
    frame: FrameType | None = inspect.currentframe()
    names: list[str] = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file != Path(__file__):
            names.append(f"{file.relative_to(ROOT)}:{frame.f_code.co_name}")
        frame = frame.f_back
    names.reverse()
    start = next(i for i, name in enumerate(names) if name.endswith(f":{top}"))
    return names[start:]


def stacks() -> dict[str, list[str]]:
    """Train a little with freezing and the cache; return the stacks of a batch and a decision."""
    seen: dict[str, list[str]] = {}

    def decide(context: FreezeContext) -> int:
        seen["a decision, from fit to the policy"] = _stack("fit")
        return 2 if context.step else 0

    def copying(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            seen["a batch, from fit to the rows of the cache"] = _stack("fit")
        return read(*arguments, **options)

    read = RowStore.read
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    data = TensorDataset(torch.randn(16, 8), torch.randint(8, (16,)))
    with (
        mock.patch.object(RowStore, "read", copying),
        Trainer(
            model,
            data,
            loss_fn=torch.nn.functional.cross_entropy,
            freeze=decide,
            epochs=4,
            global_batch_size=8,
            pipeline_length=1,
            device="cpu",
            progress=False,
        ) as trainer,
    ):
        trainer.fit()
    return seen


def main() -> None:
    """Print all counts."""
    total = [size_of(ROOT / package) for package in PACKAGES]
    for package, (files, lines) in zip(PACKAGES, total, strict=True):
        print(f"{package:16} {files:4} files {lines:6} lines")
    print(f"{'all five':16} {sum(f for f, _ in total):4} files {sum(n for _, n in total):6} lines")
    files, lines = size_of(ROOT / "tests")
    print(f"{'tests':16} {files:4} files {lines:6} lines")
    below = arrows("pipetransformer")
    layers = {part: layer_of(part, below) for part in below}
    num_arrows = sum(map(len, below.values()))
    print(
        f"pipetransformer: {len(below)} parts, {max(layers.values())} layers, {num_arrows} arrows"
    )
    for layer in range(max(layers.values()), 0, -1):
        print(f"  {layer}  {'  '.join(sorted(r for r, own in layers.items() if own == layer))}")
    for what, stack in stacks().items():
        files_on_way = len({name.split(":")[0] for name in stack})
        print(f"{what}: {len(stack)} frames in {files_on_way} files")
        for name in stack:
            print(f"  {name}")


if __name__ == "__main__":
    main()

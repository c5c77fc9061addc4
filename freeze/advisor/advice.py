"""Say what a run's layers did, which could freeze, and what that saves."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from freeze.advisor.step_times import StepCosts

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Look:
    """Hold what one look found: layers frozen, or to freeze, by a step, and relative updates.

    An update is None if its layer does not train.
    """

    step: int
    num_frozen: int
    updates: tuple[float | None, ...]
    reason: str


@dataclass(frozen=True)
class Advice:
    """Hold what was seen of a run so far: looks, oldest first, and a step's costs, if timed.

    If it `acted`, layers were frozen; else they were only watched.
    """

    num_layers: int
    acted: bool
    looks: tuple[Look, ...]
    costs: StepCosts | None

    @property
    def num_frozen(self) -> int:
        return self.looks[-1].num_frozen if self.looks else 0

    @property
    def since(self) -> int:
        """Return the step since which at least `num_frozen` layers were."""
        begin = 0
        for look in reversed(self.looks):
            if look.num_frozen < self.num_frozen:
                break
            begin = look.step
        return begin

    def __str__(self) -> str:
        if not self.looks:
            return "no advice yet: no interval is over"
        if not self.num_frozen:
            return f"no layer is quiet by step {self.looks[-1].step}: {self.looks[-1].reason}"
        last = self.num_frozen - 1
        which = "layer 0" if last == 0 else f"layers 0-{last}"
        verb = "frozen" if self.acted else "quiet"
        text = f"{which} of {self.num_layers} {verb} since step {self.since}"
        if self.costs is None:
            return text
        plain, cached = (self.costs.saved_share(self.num_frozen, cached=c) for c in (False, True))
        does = "saves" if self.acted else "freezing them would save"
        return f"{text}: {does} {plain:.0%} of each step, {cached:.0%} with a cache"

    def write(self, folder: Path) -> None:
        """Write freeze_advice.json, and freeze_advice.png; warn if matplotlib is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        values = {**asdict(self), "text": str(self)}
        (folder / "freeze_advice.json").write_text(json.dumps(values, indent=1))
        try:
            self.draw(folder / "freeze_advice.png")
        except ImportError as error:
            _LOGGER.warning("freeze_advice.png is not drawn, as matplotlib is missing: %s", error)

    def draw(self, path: Path) -> None:
        """Draw every layer's relative updates, the bottom layers dark, and the quiet layers."""
        from matplotlib import colormaps  # Optional, and slow to import.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), dpi=110, layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        steps, colors = [look.step for look in self.looks], colormaps["viridis"]
        for layer in range(self.num_layers):
            values = [look.updates[layer] or float("nan") for look in self.looks]
            upper.plot(steps, values, color=colors(layer / max(1, self.num_layers)), marker=".")
        upper.set(ylabel="relative update per step", yscale="log")
        upper.set_title("layers from dark (bottom) to light", loc="left", fontsize="small")
        lower.step(steps, [look.num_frozen for look in self.looks], where="post")
        lower.set(xlabel="step", ylabel="frozen" if self.acted else "quiet", ylim=(0, None))
        figure.savefig(path)

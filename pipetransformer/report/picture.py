"""Draw a run as a moving picture: devices, what each trains, and how pipelines regroup.

    ┌─ device ─┐   pale   frozen layers, on the first device of each pipeline
    │  ▒▒▒▒▒▒  │   dark   layers that train there
    │  ██████  │   pipelines stand apart; devices without a pipeline are faint
    └──────────┘

One SVG without scripts. A row of keyframes moves each shape from phase to phase, which lasts from
one transition to the next. It repeats, and stands still below the pointer. A reader who wants no
motion sees the last phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipetransformer.report.records import Record, of_kind

_LOOP_S = 12.0
_LEAST_SHARE = 0.12
"""Of the loop, for the shortest phase: seconds are true in the caption alone."""
_MOVE = 1.5
"""Per cent of the loop in which shapes move."""
_DEVICE, _GAP, _HEIGHT, _TOP = 64, 24, 110, 56


@dataclass(frozen=True)
class Phase:
    """State what a run was between two transitions.

    Args:
        boundaries: of stages, in sublayers; those below the first are frozen.
    """

    start_s: float
    frozen: int
    length: int
    replicas: int
    boundaries: tuple[int, ...]


def phases_of(records: Sequence[Record]) -> list[Phase]:
    """Return a run's phases; older records lack what they hold, and give none."""
    names = ("frozen", "length", "replicas", "boundaries")
    return [
        Phase(record["elapsed_s"], record["frozen"], record["length"], record["replicas"],
              tuple(record["boundaries"]))
        for record in of_kind(list(records), "transition")
        if all(name in record for name in names)
    ]  # fmt: skip


def moving_picture(records: Sequence[Record]) -> str:
    """Return a run's picture as SVG; "" where nothing has changed yet."""
    phases = phases_of(records)
    if len(phases) < 2:
        return ""
    ends = [*(phase.start_s for phase in phases[1:]), records[-1]["elapsed_s"]]
    seconds = [end - phase.start_s for phase, end in zip(phases, ends, strict=True)]
    begins = _begins(seconds)
    num_devices = max(phase.length * phase.replicas for phase in phases)
    most = max(phase.boundaries[-1] for phase in phases)
    rules: list[str] = []
    shapes: list[str] = []

    def moved(shape: str, rows: list[str]) -> None:
        name = f"run-{len(rules)}"
        rules.append(_keyframes(name, rows, begins))
        shapes.append(f'<rect class="{shape}" style="{rows[-1]};animation-name:{name}"/>')

    for device in range(num_devices):
        for shape in ("device", "frozen", "active"):
            moved(shape, [_place(phase, device, shape, most) for phase in phases])
    captions = []
    for index, (phase, taken_s) in enumerate(zip(phases, seconds, strict=True)):
        pipelines = f"{phase.replicas} pipeline{'s' * (phase.replicas > 1)}"
        devices = f"{phase.length} device{'s' * (phase.length > 1)}"
        text = f"{phase.frozen} layers frozen, {pipelines} of {devices}, {taken_s:.0f} s"
        shown = [f"opacity:{int(other == index)}" for other in range(len(phases))]
        name = f"run-text-{index}"
        rules.append(_keyframes(name, shown, begins))
        captions.append(
            f'<text x="16" y="30" style="{shown[-1]};animation-name:{name}">{text}</text>'
        )
    width = num_devices * (_DEVICE + _GAP) + _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(width, 420)} '
        f'{_TOP + _HEIGHT + 16}" width="{max(width, 420)}" font-family="sans-serif" '
        f'font-size="15" style="max-width:100%"><title>The run from phase to phase; point at it '
        f"to stop it</title><style>{_STYLE}"
        f"{''.join(rules)}</style>{''.join(shapes)}{''.join(captions)}</svg>"
    )


_STYLE = f"""
svg rect, svg text {{ animation-duration: {_LOOP_S}s; animation-iteration-count: infinite; }}
.device {{ fill: #f6f8fa; stroke: #8c959f; vector-effect: non-scaling-stroke; }}
.frozen {{ fill: #a8d1ff; }} .active {{ fill: #2f81f7; }}
rect.device, rect.frozen, rect.active {{ width: 1px; height: 1px; }}
svg:hover rect, svg:hover text {{ animation-play-state: paused; }}
@media (prefers-reduced-motion) {{ svg rect, svg text {{ animation: none; }} }}
"""


def _begins(seconds: Sequence[float]) -> list[float]:
    """Return where each phase begins, in per cent of the loop."""
    shares = [max(_LEAST_SHARE, phase_s / max(sum(seconds), 1e-9)) for phase_s in seconds]
    return [100 * at / sum(shares) for at in accumulate(shares[:-1], initial=0.0)]


def _keyframes(name: str, rows: Sequence[str], begins: Sequence[float]) -> str:
    """Hold each row until the next phase begins, and then move to it."""
    frames = []
    for index, row in enumerate(rows):
        end = begins[index + 1] if index + 1 < len(rows) else 100.0
        start = begins[index] + (_MOVE if index else 0.0)
        frames.append(f"{start:.1f}%,{max(start, end - 0.1):.1f}%{{{row}}}")
    return f"@keyframes {name}{{{''.join(frames)}}}\n"


def _place(phase: Phase, device: int, shape: str, most: int) -> str:
    """Return the CSS of a device's shape: a square of 1 pixel, moved and stretched."""
    replica, stage = divmod(device, phase.length)
    is_idle = replica >= phase.replicas
    # Devices of a pipeline touch, and the room between pipelines is what is left.
    x = _GAP + device * (_DEVICE + 4) + (_GAP - 4) * min(replica, phase.replicas)
    bounds = phase.boundaries
    frozen = bounds[0] if stage == 0 and not is_idle else 0
    active = 0 if is_idle else bounds[stage + 1] - bounds[stage]
    unit, inner = (_HEIGHT - 16) / most, _DEVICE - 16
    y, height, left, wide = {
        "device": (0.0, float(_HEIGHT), 0, _DEVICE),
        "frozen": (8.0, unit * frozen, 8, inner),
        "active": (_HEIGHT - 8 - unit * active, unit * active, 8, inner),
    }[shape]
    faint = 0.35 if is_idle else 1
    return (
        f"transform:translate({x + left}px,{_TOP + y:.1f}px) scale({wide},{height:.2f});"
        f"opacity:{faint}"
    )

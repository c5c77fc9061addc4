"""Prove that a run's moving picture shows the phases that were recorded."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from pipetransformer.report.picture import moving_picture


def transition(elapsed_s: float, frozen: int, length: int, replicas: int, *bounds: int) -> Any:
    return {
        "kind": "transition", "step": 0, "elapsed_s": elapsed_s, "frozen": frozen,
        "length": length, "replicas": replicas, "boundaries": list(bounds),
    }  # fmt: skip


RECORDS = [
    transition(0.0, 0, 2, 1, 0, 6, 12),
    transition(30.0, 3, 1, 2, 6, 12),
    {"kind": "end", "step": 9, "elapsed_s": 40.0},
]


def rows_of(picture: str, name: str) -> list[str]:
    """Return the rows between which a shape moves."""
    (frames,) = re.findall(rf"@keyframes {name}{{(.*)}}\n", picture)
    return re.findall(r"{([^}]*)}", frames)


def test_shapes_move_from_one_pipeline_of_two_to_two_of_one() -> None:
    picture = moving_picture(RECORDS)
    rects = ElementTree.fromstring(picture).findall("{http://www.w3.org/2000/svg}rect")
    assert [rect.get("class") for rect in rects] == ["device", "frozen", "active"] * 2
    heights = [
        [
            float(re.findall(r"scale\(\d+,([\d.]+)\)", row)[0])
            for row in rows_of(picture, f"run-{n}")
        ]
        for n in range(6)
    ]
    # 94 pixels are 12 sublayers: half of them is 47. Then each replica has all, half of it frozen.
    assert heights == [[110, 110], [0, 47], [47, 47]] * 2


def test_a_phase_takes_its_share_of_the_loop_and_says_its_seconds() -> None:
    picture = moving_picture(RECORDS)
    assert "0 layers frozen, 1 pipeline of 2 devices, 30 s" in picture
    assert "3 layers frozen, 2 pipelines of 1 device, 10 s" in picture
    assert "0.0%,74.9%{opacity:1}76.5%,99.9%{opacity:0}" in picture


def test_a_device_that_no_pipeline_uses_is_faint() -> None:
    idle = [RECORDS[0], transition(30.0, 3, 1, 1, 6, 12), RECORDS[2]]
    assert rows_of(moving_picture(idle), "run-3")[1].endswith("opacity:0.35")
    assert rows_of(moving_picture(RECORDS), "run-3")[1].endswith("opacity:1")


def test_many_devices_fit_the_page_and_the_picture_can_be_stopped() -> None:
    picture = moving_picture([transition(0.0, 0, 1, 64, 0, 12), *RECORDS])
    root = ElementTree.fromstring(picture)
    assert int(root.get("width", "")) > 5000 and root.get("style") == "max-width:100%"
    assert "svg:hover rect, svg:hover text { animation-play-state: paused; }" in picture


def test_a_run_that_never_changed_has_no_picture() -> None:
    assert moving_picture(RECORDS[:1]) == moving_picture([]) == ""

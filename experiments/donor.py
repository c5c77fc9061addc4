"""Reproduce the pretrained weights that the demo starts from: `make donor`."""

from __future__ import annotations

from pathlib import Path

from experiments.demo import DONOR_FILE, make_donor

if __name__ == "__main__":
    path = Path("runs") / DONOR_FILE
    make_donor(path)
    print(f"wrote {path}")

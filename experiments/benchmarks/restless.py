"""Keep one core busy, on and off at random, as other people's jobs do; for `busy`.

Run by its path, so that it starts at once; it ends when whoever started it does.
"""

from __future__ import annotations

import os
import random
import sys
import time

MEAN_S = 0.8
"""Mean seconds for which the core is taken, and for which it is given back."""


def be_restless(seed: int) -> None:
    """Take a core and give it back, for as long as the parent lives."""
    parent, rng = os.getppid(), random.Random(seed)
    while os.getppid() == parent:
        end = time.perf_counter() + rng.expovariate(1 / MEAN_S)
        while time.perf_counter() < end:
            pass
        time.sleep(rng.expovariate(1 / MEAN_S))


if __name__ == "__main__":
    be_restless(int(sys.argv[1]))

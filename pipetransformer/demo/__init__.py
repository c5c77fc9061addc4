"""Show the framework at work in four minutes: `pipetransformer demo`.

run ─┬─► trained_here   the donor, nothing frozen, and the elastic run: the Trainer
     ├─► by_hand        the same freezing without the Trainer: torch's pipeline, a plain loop
     └─► results        what each run came to, and the table
                        settings, digits and held_up are under all of them
"""

from pipetransformer.demo.digits import build_model, load_digits_split
from pipetransformer.demo.held_up import HeldUp
from pipetransformer.demo.run import add_demo_parser, run_demo
from pipetransformer.demo.settings import DemoSettings

__all__ = [
    "DemoSettings", "HeldUp", "add_demo_parser", "build_model", "load_digits_split", "run_demo",
]  # fmt: skip

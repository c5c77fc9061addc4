"""Show the framework at work in three and a half minutes: `pipetransformer demo`.

command ─┬─► loops     a loop of one's own, with two lines more, and from kept rows
         ├─► runs      the donor, nothing frozen, the elastic run, and a plain loop by hand
         └─► results   what each run came to, and the table
                       digits, the model and its data, is under them
"""

from pipetransformer.demo.command import add_demo_parser, run_demo
from pipetransformer.demo.digits import build_model, load_digits_split
from pipetransformer.demo.results import RunQueueWait
from pipetransformer.demo.runs import DemoSettings

__all__ = [
    "DemoSettings", "RunQueueWait", "add_demo_parser", "build_model", "load_digits_split",
    "run_demo",
]  # fmt: skip

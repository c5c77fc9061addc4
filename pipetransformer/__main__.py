"""Offer the command line as `python -m pipetransformer`."""

import sys

from pipetransformer.cli import main

if __name__ == "__main__":
    sys.exit(main())

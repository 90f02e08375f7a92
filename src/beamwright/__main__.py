"""Entry point of `python -m beamwright`: the command line."""

import sys

from beamwright.cli import main

if __name__ == "__main__":
    sys.exit(main())

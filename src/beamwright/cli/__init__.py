"""The command line: options, progress and output. The work itself is done in other packages."""

from beamwright.cli.app import main

__all__ = ["main"]

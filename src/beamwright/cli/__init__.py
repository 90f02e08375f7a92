"""The command line: options, progress and output. All work happens in the rooms above."""

from beamwright.cli.app import main

__all__ = ["main"]

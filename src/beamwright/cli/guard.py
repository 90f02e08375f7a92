"""From exceptions to exit codes: one line on standard error, a traceback only when asked for."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from beamwright.cli.output import one_line
from beamwright.errors import BeamwrightError

INTERRUPTED = 130


@contextmanager
def guard(debug: bool) -> Iterator[None]:
    """End the command with the exit code of whatever is raised inside.

    2 for bad input, 1 for other failures, 130 for Ctrl-C.
    """
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt as error:
        _stop("interrupted", INTERRUPTED, debug, error)
    except BeamwrightError as error:
        _stop(f"error: {error}", error.exit_code, debug, error)
    except BrokenPipeError as error:  # the reader of our output has gone; nobody to tell
        # Or the interpreter complains when it flushes on its way out.
        sys.stdout = None
        raise typer.Exit(1) from error
    except OSError as error:  # of what nobody reads or writes on purpose: a full standard output
        where = error.filename or "standard output"
        _stop(f"error: {where}: {error.strerror or error}", 1, debug, error)
    except MemoryError as error:
        _stop("error: out of memory (lower --n, --kv-memory or --host-memory)", 1, debug, error)
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        _stop(f"internal error: {what} (--debug shows where)", 1, debug, error)


def complain(line: str) -> None:
    """One line on standard error, whatever the text holds."""
    typer.echo(f"beamwright: {one_line(line)}", err=True)


def _stop(line: str, exit_code: int, debug: bool, error: BaseException) -> None:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    complain(line)
    # Not from the error: a StopIteration behind it would be taken for this generator's own.
    raise typer.Exit(exit_code) from None

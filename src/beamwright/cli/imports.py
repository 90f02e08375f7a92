"""The first import of a room that brings PyTorch along, or needs an extra."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from beamwright.errors import InputError

_SERVE_PACKAGES = ("fastapi", "starlette", "uvicorn", "prometheus_client")


@contextmanager
def first_import(module: str) -> Iterator[None]:
    """Import a module inside. What it leaves is never looked through for garbage.

    Some hundred thousand objects, all of which stay: collections among them take a sixth of the
    time. Only where the module is not there yet, and only here: a process of the command line is
    this program's own.
    """
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def needs_serve(command: str) -> Iterator[None]:
    """Import what the extra `serve` brings inside.

    Raises:
        InputError: where it is not installed; one line says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _SERVE_PACKAGES:
            raise
        what = f"beamwright {command} needs {error.name}"
        raise InputError(f"{what} (pip install 'beamwright[serve]')") from error

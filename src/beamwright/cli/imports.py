"""The first import of a room that brings PyTorch along."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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

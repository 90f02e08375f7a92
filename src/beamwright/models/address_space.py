"""What this process may still map, and what it holds without use."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

if sys.platform != "win32":
    import resource


def address_space_left() -> int | None:
    """Bytes that this process may still map (`ulimit -v`); None without a limit."""
    if sys.platform == "win32":
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        pages = 0
    return max(0, limit - pages * resource.getpagesize())


def give_back() -> None:
    """Return freed memory to the system: glibc keeps what lies between blocks that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)

"""Memory of the device and of this process: a cap, what is free, what was refused, what is kept.

A card with 141 GB behaves like one with 24 GB under the cap. Not measured on a GPU.
`plan` asks for the address space, and does not wait for torch.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from beamwright.errors import InputError

if sys.platform != "win32":
    import resource
if TYPE_CHECKING:
    import torch

_REFUSED = ("can't allocate memory", "not enough memory", "out of memory", "failed to map")


def cap_memory(name: str, limit_bytes: int | None) -> None:
    """Let this process allocate at most so much on a GPU, or all (None).

    More than that raises OutOfMemoryError.

    The driver's own context (some 0.5 GB) is outside the allocator and is not counted.

    Raises:
        InputError: if the card has less than that.
    """
    import torch  # noqa: PLC0415 (see above)

    device = torch.device(name)
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    if limit_bytes is None:
        torch.cuda.set_per_process_memory_fraction(1.0, index)
        return
    total = torch.cuda.get_device_properties(index).total_memory
    if limit_bytes > total:
        raise InputError(f"--memory {limit_bytes:,} bytes: {device} has {total:,}")
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total, index)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation was refused: by a card, by the system, or by a limit of the process.

    torch says so on a CPU with a plain RuntimeError.
    """
    import torch  # noqa: PLC0415 (see above)

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _REFUSED)


def free_bytes(device: torch.device) -> Callable[[], int] | None:
    """A function that says what can be allocated at the moment; None for a CPU."""
    return partial(_cuda_free_bytes, device) if device.type == "cuda" else None


def _cuda_free_bytes(device: torch.device) -> int:
    import torch  # noqa: PLC0415 (see above)

    on_card, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    used = torch.cuda.memory_allocated(device)
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    # The allocator may take what is left on the card under its cap, and has idle blocks of its own.
    return max(0, min(on_card, cap - reserved)) + reserved - used


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

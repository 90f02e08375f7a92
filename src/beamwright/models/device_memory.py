"""The device's memory: a cap on what this process may allocate, what is free, what was refused.

A card with 141 GB behaves like one with 24 GB under the cap. Not measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from beamwright.errors import InputError


def cap_memory(name: str, limit_bytes: int | None) -> None:
    """Let this process allocate at most so much on a GPU, or all (None).

    More than that raises OutOfMemoryError.

    The driver's own context (some 0.5 GB) is outside the allocator and is not counted.

    Raises:
        InputError: if the card has less than that.
    """
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


_REFUSED = ("can't allocate memory", "not enough memory", "out of memory", "failed to map")


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation was refused: by a card, by the system, or by a limit of the process.

    torch says so on a CPU with a plain RuntimeError.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _REFUSED)


def free_bytes(device: torch.device) -> Callable[[], int] | None:
    """A function that says what can be allocated at the moment; None for a CPU."""
    return partial(_cuda_free_bytes, device) if device.type == "cuda" else None


def _cuda_free_bytes(device: torch.device) -> int:
    on_card, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    used = torch.cuda.memory_allocated(device)
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    # The allocator may take what is left on the card under its cap, and has idle blocks of its own.
    return max(0, min(on_card, cap - reserved)) + reserved - used

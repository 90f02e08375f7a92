"""Triton kernel that copies many KV blocks between a GPU and page-locked memory in one launch.

To queue one copy takes the host about 8 us, which is longer than a small model's block needs to
cross the link. Few programs suffice for a link, because each keeps 32 KiB in flight. More would
take multiprocessors from compute that runs at the same time
(docs/log/2026-11.md#small-blocks-across-the-link). This module is imported only where the kernel
runs.

Annotations are not postponed here (no `from __future__`), because Triton reads `tl.constexpr` from
them.
"""

import ctypes

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

_UNIT_BYTES = 16  # bytes that a thread loads at once; a block is a multiple of this
_PROGRAMS, _WARPS, _TILE_UNITS = 8, 8, 2048
_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


@triton.jit(do_not_specialize=["count", "units"])
def copy_blocks(there, here, numbers, count, units, UNITS: tl.constexpr):
    """Copy block numbers[1, i] of `here` to block numbers[0, i] of `there`, for all i < `count`.

    there, here: pointers to 32-bit words.
    units: number of 16-byte units in a block. A tile has UNITS such units, and programs take tiles
        in turn.
    """
    tiles = tl.cdiv(units, UNITS)
    at = tl.arange(0, 4 * UNITS)
    for item in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
        entry = item // tiles
        first = (item % tiles) * UNITS
        to = tl.load(numbers + entry).to(tl.int64) * units + first
        source = tl.load(numbers + count + entry).to(tl.int64) * units + first
        inside = at < (units - first) * 4
        words = tl.load(here + source * 4 + at, inside, cache_modifier=".cg")
        tl.store(there + to * 4 + at, words, inside, cache_modifier=".cs")


def copy_numbered_blocks(there: Tensor, here: Tensor, numbers: NDArray[np.int32]) -> None:
    """Copy blocks of `here` to blocks of `there`, on the current CUDA stream.

    there, here: [block, bytes], one on a GPU and the other in page-locked memory.
    numbers: [2, count], the block numbers of destinations, then of sources.
    """
    device = there.device if there.is_cuda else here.device
    table = torch.from_numpy(numbers)
    if device.type == "cuda":  # the table's memory is not reused before its queued copies end
        table = table.pin_memory().to(device, non_blocking=True)
    sides = (side.flatten().view(torch.int32) for side in (there, here))
    units = there.shape[1] // _UNIT_BYTES
    sizes = table, numbers.shape[1], units
    copy_blocks[(_PROGRAMS,)](*sides, *sizes, _TILE_UNITS, num_warps=_WARPS)


def sees_host_memory(device: torch.device) -> bool:
    """Return True if this GPU addresses page-locked host memory by the host's pointers."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    handle, answer = ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    driver.cuDeviceGet(ctypes.byref(handle), index)
    driver.cuDeviceGetAttribute(ctypes.byref(answer), _HOST_POINTERS, handle)
    return bool(answer.value)

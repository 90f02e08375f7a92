"""Many blocks between a card and page-locked memory in one launch, where a copy each costs more.

A queued copy takes the host some 8 us: a small model's block has crossed the link before. Few
programs do for a link, since each has 32 KiB on their way; more take what computes beside them its
processors (docs/log/2026-11.md#small-blocks-across-the-link). Loaded only where it runs.

No annotations are postponed here: Triton reads `tl.constexpr` from them.
"""

import ctypes

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

_UNIT_BYTES = 16  # what a thread loads at once; blocks are whole units
_PROGRAMS, _WARPS, _TILE_UNITS = 8, 8, 2048
_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


@triton.jit(do_not_specialize=["count", "units"])
def move_blocks(there, here, numbers, count, units, UNITS: tl.constexpr):
    """Block numbers[1, i] of `here` becomes block numbers[0, i] of `there`, both of 32-bit words.

    units: of a block; UNITS of them are a tile, and programs take tiles in turn.
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


def copy_listed(there: Tensor, here: Tensor, numbers: NDArray[np.int32]) -> None:
    """Blocks [block, bytes] of `here` to those of `there`, behind the current stream's work.

    numbers: [destinations or sources, block]. One side is a card's, the other page-locked.
    """
    device = there.device if there.is_cuda else here.device
    table = torch.from_numpy(numbers)
    if device.type == "cuda":  # both allocators let nobody have a table before its copies end
        table = table.pin_memory().to(device, non_blocking=True)
    sides = (side.flatten().view(torch.int32) for side in (there, here))
    units = there.shape[1] // _UNIT_BYTES
    sizes = table, numbers.shape[1], units
    move_blocks[(_PROGRAMS,)](*sides, *sizes, _TILE_UNITS, num_warps=_WARPS)


def sees_host_memory(device: torch.device) -> bool:
    """True if page-locked memory has the host's addresses on this card, too."""
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

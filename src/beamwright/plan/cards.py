"""GPUs by name, as their vendor describes them. Published peaks, nothing measured. No torch.

FLOP/s are dense: 16-bit matrix products with 32-bit accumulation, and float32 outside the tensor
cores. Where a source gives no figure for a card, its multiprocessors at boost clock times 512
operations are taken, which is what the same source counts for its siblings (Ampere, Ada and
Blackwell GeForce); of a laptop's, the highest clock that its maker may allow. Memory is the nominal
size: what a driver, a desktop or ECC keeps is not known. Only what PyTorch calls a CUDA device is
here, which Radeons are to its build for ROCm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType

from beamwright.units import GIB

_VARIANTS = {"ti", "super", "laptop"}  # of a name: other chips

# Nominal bytes/s of sixteen PCIe lanes in one direction, by generation.
_PCIE_X16 = MappingProxyType({3: 15.75e9, 4: 31.5e9, 5: 63.0e9})

_GA102 = "NVIDIA Ampere GA102 architecture whitepaper, appendix A"
_ADA = "NVIDIA Ada architecture whitepaper, appendices"
_BLACKWELL = "NVIDIA RTX Blackwell architecture whitepaper, appendices"
_PRODUCT_PAGE = "NVIDIA GeForce product page: memory, multiprocessors, boost clock"
_LAPTOP = "NVIDIA GeForce laptop page: memory, multiprocessors, highest boost clock"
_RADEON = "AMD Radeon product page: memory, peak half and single precision"
_UNTRIED = "by PyTorch for ROCm, which nobody has tried"


@dataclass(frozen=True)
class Card:
    """One GPU. tflops: of 16-bit matrix products; float32_tflops: of float32 without tensor cores.

    bandwidth_gb: GB/s of its memory. pcie: generation and lanes. capability: CUDA's compute
    capability, (0, 0) for others' cards. source: the data sheet. note: what differs from it.
    """

    name: str
    memory_gib: int
    bandwidth_gb: float
    tflops: float
    float32_tflops: float
    pcie: tuple[int, int]
    capability: tuple[int, int]
    source: str
    note: str = ""

    @property
    def memory_bytes(self) -> int:
        """Nominal memory."""
        return self.memory_gib * GIB

    @property
    def link_bandwidth(self) -> float:
        """Nominal bytes/s of the link to the host, each direction."""
        generation, lanes = self.pcie
        return _PCIE_X16[generation] * lanes / 16

    @property
    def has_int4_kernel(self) -> bool:
        """True if torchao's int4 kernel runs here (bfloat16, from compute capability 8 on)."""
        return self.capability >= (8, 0)

    def flops(self, element_bytes: int) -> float:
        """Peak FLOP/s of matrix products in 16 bits, or in float32."""
        return 1e12 * (self.tflops if element_bytes <= 2 else self.float32_tflops)


CARDS = MappingProxyType(
    {
        card.name: card
        for card in (
            Card("rtx-3060", 12, 360, 25.5, 12.7, (4, 16), (8, 6), _PRODUCT_PAGE),
            Card("rtx-3060-laptop", 6, 336, 26.2, 13.1, (4, 16), (8, 6), _LAPTOP),
            Card("rtx-3060-ti", 8, 448, 32.4, 16.2, (4, 16), (8, 6), _PRODUCT_PAGE),
            Card("rtx-3070", 8, 448, 40.6, 20.3, (4, 16), (8, 6), _PRODUCT_PAGE),
            Card("rtx-3070-laptop", 8, 448, 33.2, 16.6, (4, 16), (8, 6), _LAPTOP),
            Card("rtx-3080", 10, 760, 59.5, 29.8, (4, 16), (8, 6), _GA102),
            Card("rtx-3080-ti", 12, 912, 68.2, 34.1, (4, 16), (8, 6), _PRODUCT_PAGE),
            Card("rtx-3090", 24, 936, 71.0, 35.6, (4, 16), (8, 6), _GA102),
            Card("rtx-4060", 8, 272, 30.2, 15.1, (4, 8), (8, 9), _PRODUCT_PAGE),
            Card("rtx-4060-laptop", 8, 256, 29.1, 14.6, (4, 8), (8, 9), _LAPTOP),
            Card("rtx-4060-ti-8gb", 8, 288, 44.1, 22.1, (4, 8), (8, 9), _PRODUCT_PAGE),
            Card("rtx-4060-ti-16gb", 16, 288, 44.1, 22.1, (4, 8), (8, 9), _PRODUCT_PAGE),
            Card("rtx-4070", 12, 504, 58.3, 29.1, (4, 16), (8, 9), _PRODUCT_PAGE),
            Card("rtx-4070-laptop", 8, 256, 40.1, 20.0, (4, 8), (8, 9), _LAPTOP),
            Card("rtx-4070-super", 12, 504, 71.0, 35.5, (4, 16), (8, 9), _PRODUCT_PAGE),
            Card("rtx-4070-ti", 12, 504, 80.2, 40.1, (4, 16), (8, 9), _PRODUCT_PAGE),
            Card("rtx-4070-ti-super", 16, 672, 88.2, 44.1, (4, 16), (8, 9), _PRODUCT_PAGE),
            Card("rtx-4080", 16, 717, 97.5, 48.7, (4, 16), (8, 9), _ADA),
            Card("rtx-4080-laptop", 12, 432, 67.7, 33.9, (4, 16), (8, 9), _LAPTOP),
            Card("rtx-4080-super", 16, 736, 104.4, 52.2, (4, 16), (8, 9), _PRODUCT_PAGE),
            Card(
                "rtx-4090", 24, 1008, 165.2, 82.6, (4, 8), (8, 9), _ADA,
                note="in eight lanes, as in the LBS paper's machine; rtx-4090-x16 has all",
            ),
            Card("rtx-4090-x16", 24, 1008, 165.2, 82.6, (4, 16), (8, 9), _ADA),
            Card("rtx-4090-laptop", 16, 576, 79.4, 39.7, (4, 16), (8, 9), _LAPTOP),
            Card("rtx-5060", 8, 448, 38.4, 19.2, (5, 8), (12, 0), _PRODUCT_PAGE),
            Card("rtx-5060-ti-8gb", 8, 448, 47.4, 23.7, (5, 8), (12, 0), _PRODUCT_PAGE),
            Card("rtx-5060-ti-16gb", 16, 448, 47.4, 23.7, (5, 8), (12, 0), _PRODUCT_PAGE),
            Card("rtx-5070", 12, 672, 61.7, 30.9, (5, 16), (12, 0), _PRODUCT_PAGE),
            Card("rtx-5070-laptop", 8, 384, 43.3, 21.6, (5, 8), (12, 0), _LAPTOP),
            Card("rtx-5070-ti", 16, 896, 87.9, 43.9, (5, 16), (12, 0), _BLACKWELL),
            Card("rtx-5080", 16, 960, 112.6, 56.3, (5, 16), (12, 0), _BLACKWELL),
            Card("rtx-5090", 32, 1792, 209.5, 104.8, (5, 16), (12, 0), _BLACKWELL),
            Card("rx-7600", 8, 288, 43.5, 21.8, (4, 8), (0, 0), _RADEON, note=_UNTRIED),
            Card("rx-7700-xt", 12, 432, 70.3, 35.2, (4, 16), (0, 0), _RADEON, note=_UNTRIED),
            Card("rx-7800-xt", 16, 624, 74.7, 37.3, (4, 16), (0, 0), _RADEON, note=_UNTRIED),
            Card("rx-7900-xt", 20, 800, 103.0, 51.5, (4, 16), (0, 0), _RADEON, note=_UNTRIED),
            Card("rx-7900-xtx", 24, 960, 122.8, 61.4, (4, 16), (0, 0), _RADEON, note=_UNTRIED),
            Card("t4", 16, 300, 65.0, 8.1, (3, 16), (7, 5), "NVIDIA T4 data sheet"),
            Card("l4", 24, 300, 121.0, 30.3, (4, 16), (8, 9), "NVIDIA L4 data sheet"),
            Card("a10", 24, 600, 125.0, 31.2, (4, 16), (8, 6), "NVIDIA A10 data sheet"),
            Card(
                "a100-40gb", 40, 1555, 312.0, 19.5, (4, 16), (8, 0), "NVIDIA A100 data sheet, SXM"
            ),
            Card(
                "a100-80gb", 80, 2039, 312.0, 19.5, (4, 16), (8, 0), "NVIDIA A100 data sheet, SXM"
            ),
            Card("h100", 80, 3350, 989.0, 67.0, (5, 16), (9, 0), "NVIDIA H100 data sheet, SXM"),
            Card("h200", 141, 4800, 989.0, 67.0, (5, 16), (9, 0), "NVIDIA H200 data sheet, SXM"),
        )
    }
)  # fmt: skip


def card_of_device(device_name: str, memory_bytes: int) -> Card | None:
    """The card that CUDA calls so; None if it is none of these.

    memory_bytes: what CUDA says that it has, which tells cards of one name apart.
    """
    words = re.sub(r"[^a-z0-9]+", " ", device_name.lower()).split()
    if "max" in words:  # Max-Q: another clock
        return None
    for card in CARDS.values():
        named = [word for word in card.name.split("-") if not word.endswith("gb")]
        variant = _VARIANTS & set(words) == _VARIANTS & set(named)
        near = 0.85 <= memory_bytes / card.memory_bytes <= 1.05
        if variant and near and set(named) <= set(words):
            return card
    return None

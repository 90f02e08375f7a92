"""What machines can do: named profiles, and the machine at hand by measuring it."""

from beamwright.hardware.cache import default_cache_file, read_profile, write_profile
from beamwright.hardware.cards import CARDS, card_of_device
from beamwright.hardware.named import (
    CUSTOM,
    DEFAULT_PROFILE,
    MEASURED,
    NAMED_PROFILES,
    card_profile,
    find_profile,
    in_precision,
)
from beamwright.hardware.probe import ProbeSizes, measure_gemm_flops, measure_profile
from beamwright.hardware.profile import HardwareProfile

__all__ = [
    "CARDS",
    "CUSTOM",
    "DEFAULT_PROFILE",
    "MEASURED",
    "NAMED_PROFILES",
    "HardwareProfile",
    "ProbeSizes",
    "card_of_device",
    "card_profile",
    "default_cache_file",
    "find_profile",
    "in_precision",
    "measure_gemm_flops",
    "measure_profile",
    "read_profile",
    "write_profile",
]

"""What machines can do: named profiles, and the machine at hand by measuring it."""

from beamwright.hardware.cache import default_cache_file, read_profile, write_profile
from beamwright.hardware.named import DEFAULT_PROFILE, NAMED_PROFILES, find_profile
from beamwright.hardware.probe import ProbeSizes, measure_gemm_flops, measure_profile
from beamwright.hardware.profile import HardwareProfile

__all__ = [
    "DEFAULT_PROFILE",
    "NAMED_PROFILES",
    "HardwareProfile",
    "ProbeSizes",
    "default_cache_file",
    "find_profile",
    "measure_gemm_flops",
    "measure_profile",
    "read_profile",
    "write_profile",
]

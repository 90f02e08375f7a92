"""What the machine at hand can do, by measuring it."""

from beamwright.hardware.probe import measure_gemm_flops

__all__ = ["measure_gemm_flops"]

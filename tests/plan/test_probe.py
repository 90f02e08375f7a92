from beamwright.plan.machines import HardwareProfile, read_profile, write_profile
from beamwright.plan.probe import ProbeSizes, measure_gemm_flops, measure_profile

SMALL = ProbeSizes(gemm_size=128, read_bytes=2**20, copy_bytes=2**21, num_small_ops=20, repeats=2)


def test_this_machine_gets_a_valid_profile_that_survives_the_cache(tmp_path):
    profile = measure_profile(SMALL)
    assert isinstance(profile, HardwareProfile)
    assert profile.name == "measured"
    assert profile.element_bytes == 4
    # Any machine that runs this: over 64 MiB of RAM, and an operator costs less than a second.
    assert profile.device_memory_bytes > 2**26
    assert 0 < profile.launch_s < 1
    assert read_profile(write_profile(profile, tmp_path / "p.json")) == profile


def test_the_gemm_rate_counts_two_operations_per_product():
    assert measure_gemm_flops(64, repeats=2) > 1e6

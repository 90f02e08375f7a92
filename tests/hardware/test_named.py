import pytest

from beamwright.errors import InputError
from beamwright.hardware import (
    DEFAULT_PROFILE,
    NAMED_PROFILES,
    find_profile,
    in_precision,
    write_profile,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "memory_gib", "bandwidth_gb", "link_gb"),
    [
        ("rtx-3060", 12, 360, 31.5),
        ("rtx-3080-ti", 12, 912, 31.5),
        ("rtx-4060-ti-16gb", 16, 288, 15.75),
        ("rtx-4090", 24, 1008, 15.75),
        ("rtx-4090-x16", 24, 1008, 31.5),
        ("rtx-5090", 32, 1792, 63.0),
        ("t4", 16, 300, 15.75),
        ("a100-80gb", 80, 2039, 31.5),
        ("h100", 80, 3350, 63.0),
        ("h200", 141, 4800, 63.0),
    ],
)
def test_published_figures(name, memory_gib, bandwidth_gb, link_gb):
    profile = find_profile(name)
    assert profile.name == name
    assert profile.device_memory_bytes == memory_gib * GIB
    assert profile.device_bandwidth == bandwidth_gb * 1e9
    assert profile.h2d_bandwidth == profile.d2h_bandwidth == link_gb * 1e9
    assert profile.element_bytes == 2


def test_float32_runs_beside_the_tensor_cores():
    half = find_profile("rtx-4090")
    single = in_precision(half, 4)
    assert (half.flops, single.flops) == (165.2e12, 82.6e12)
    assert single.device_bandwidth == half.device_bandwidth
    cpu = find_profile("epyc-2core")
    assert in_precision(cpu, 2) is cpu


def test_names_are_found_in_any_case_and_the_default_is_one():
    assert find_profile("RTX 4090") is NAMED_PROFILES[DEFAULT_PROFILE]
    assert find_profile("A100") is NAMED_PROFILES["a100-80gb"]
    assert all(name == profile.name for name, profile in NAMED_PROFILES.items())


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match=r"rtx-5091: no such profile.*rtx-5090.*measured"):
        find_profile("rtx-5091")


def test_measured_is_read_from_the_cache(tmp_path):
    file = tmp_path / "profile.json"
    with pytest.raises(InputError, match="beamwright doctor --probe"):
        find_profile("measured", file)
    write_profile(NAMED_PROFILES["epyc-2core"], file)
    assert find_profile("measured", file) == NAMED_PROFILES["epyc-2core"]

import pytest

from beamwright.errors import InputError
from beamwright.plan.machines import (
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
        ("rtx-3070", 8, 448, 31.5),
        ("rtx-3080-ti", 12, 912, 31.5),
        ("rtx-4060", 8, 272, 15.75),
        ("rtx-4070-super", 12, 504, 31.5),
        ("rtx-4060-ti-16gb", 16, 288, 15.75),
        ("rtx-4090", 24, 1008, 15.75),
        ("rtx-4090-x16", 24, 1008, 31.5),
        ("rtx-5060-ti-8gb", 8, 448, 31.5),
        ("rtx-5070-laptop", 8, 384, 31.5),
        ("rtx-5090", 32, 1792, 63.0),
        ("rx-7900-xtx", 24, 960, 31.5),
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


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rtx-5091", "did you mean rtx-5090, "),
        ("4070", "did you mean rtx-4070, rtx-4070-laptop, rtx-4070-super, rtx-4070-ti, rtx-4070"),
        ("RTX 4060 Ti", "did you mean rtx-4060-ti-8gb, rtx-4060-ti-16gb?"),
        ("7900-xtx", "did you mean rx-7900-xtx?"),
        ("m2", "models run on CUDA devices and CPUs here; measured is"),
        ("Arc A770", "models run on CUDA devices and CPUs here; measured is"),
        ("sofa", "no such profile; --gpu list shows all; or write custom:12GB,360GB/s,25TFLOPS"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(name, near):
    with pytest.raises(InputError, match=f"--gpu {name}: no such profile") as caught:
        find_profile(name)
    assert near in str(caught.value)


def test_a_card_of_ones_own():
    found = find_profile("custom:12GB, 360GB/s, 25.5TFLOPS")
    assert found.name == "custom"
    assert found.device_memory_bytes == 12 * 10**9
    assert (found.device_bandwidth, found.flops) == (360e9, 25.5e12)
    assert found.h2d_bandwidth == 31.5e9
    for wrong in ("12GB", "12GB,360GB/s", "12GB,fast,25TFLOPS", "12G,360GB/s,25", "1GB,1GB/s,nan"):
        with pytest.raises(InputError, match=r"write custom:12GB,360GB/s,25TFLOPS$"):
            find_profile(f"custom:{wrong}")


def test_measured_is_read_from_the_cache(tmp_path):
    file = tmp_path / "profile.json"
    with pytest.raises(InputError, match="beamwright doctor --probe"):
        find_profile("measured", file)
    write_profile(NAMED_PROFILES["epyc-2core"], file)
    for name in ("measured", "cpu", "CPU"):
        assert find_profile(name, file) == NAMED_PROFILES["epyc-2core"]

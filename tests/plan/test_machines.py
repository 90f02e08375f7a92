"""Machines by name, by what CUDA calls them, as they were given, and as they were measured."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from beamwright.errors import InputError
from beamwright.plan.machines import (
    CARDS,
    DEFAULT_PROFILE,
    NAMED_PROFILES,
    card_of_device,
    default_cache_file,
    find_profile,
    in_precision,
    read_profile,
    write_profile,
)

GIB = 2**30
PROFILE = NAMED_PROFILES["h100"]


@pytest.mark.parametrize(
    ("name", "memory_gib", "bandwidth_gb", "link_gb"),
    [
        ("rtx-3060", 12, 360, 31.5),
        ("rtx-4060", 8, 272, 15.75),
        ("rtx-4090", 24, 1008, 15.75),
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


@pytest.mark.parametrize(
    ("device_name", "memory_gib", "name"),
    [
        ("NVIDIA GeForce RTX 3060", 11.8, "rtx-3060"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.6, "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        # Another chip, or another amount of memory, is another card.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 3070 with Max-Q Design", 7.8, None),
        ("NVIDIA GeForce RTX 3060", 7.8, None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.7, "rtx-4070-ti-super"),
        ("AMD Radeon RX 7900 XTX", 24, "rx-7900-xtx"),
        ("AMD Radeon", 15.6, None),
    ],
)
def test_a_card_by_what_cuda_calls_it(device_name, memory_gib, name):
    found = card_of_device(device_name, round(memory_gib * GIB))
    assert (found and found.name) == name


def test_kernels_need_bfloat16():
    without = {name for name, card in CARDS.items() if not card.has_kernels}
    assert without == {"t4", *(name for name in CARDS if name.startswith("rx-"))}


def test_the_cards_are_reckoned_alike():
    """Of GeForce cards, 16-bit products run at twice the rate of float32."""
    for name, card in CARDS.items():
        assert card.source
        assert NAMED_PROFILES[name].device_memory_bytes == card.memory_gib * GIB
        if name.startswith("rtx-"):
            assert card.tflops == pytest.approx(2 * card.float32_tflops, rel=0.01), name


def test_the_default_is_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert default_cache_file() == tmp_path / ".cache" / "beamwright" / "profile.json"
    assert write_profile(PROFILE) == default_cache_file()
    assert read_profile() == PROFILE
    assert [*default_cache_file().parent.iterdir()] == [default_cache_file()], "no partial file"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_profile(PROFILE, tmp_path / "file" / "profile.json")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps({**asdict(PROFILE), "extra": 1}),
        json.dumps({**asdict(PROFILE), "flops": "fast"}),
        json.dumps({**asdict(PROFILE), "device_memory_bytes": 1.5}),
        json.dumps({**asdict(PROFILE), "link_share": 2.0}),
        json.dumps({**asdict(PROFILE), "launch_s": 0}),
        "\xff",
    ],
)
def test_a_broken_file_is_named_with_what_to_do(tmp_path, text):
    file = tmp_path / "profile.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"profile\.json: not a hardware profile.*--probe"):
        read_profile(file)

"""Machines by name, by what CUDA calls them, as they were given, and as they were measured."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from beamwright.errors import InputError
from beamwright.io import read_toml_beside
from beamwright.plan import machines

GIB = 2**30
PROFILE = machines.NAMED_PROFILES["h100"]
TABLES = read_toml_beside(__file__)


@pytest.mark.parametrize(("name", "memory_gib", "bandwidth_gb", "link_gb"), TABLES["published"])
def test_published_figures(name, memory_gib, bandwidth_gb, link_gb):
    profile = machines.find_profile(name)
    assert profile.name == name
    assert profile.device_memory_bytes == memory_gib * GIB
    assert profile.device_bandwidth == bandwidth_gb * 1e9
    assert profile.h2d_bandwidth == profile.d2h_bandwidth == link_gb * 1e9
    assert profile.element_bytes == 2


def test_float32_runs_beside_the_tensor_cores():
    half = machines.find_profile("rtx-4090")
    single = machines.for_element_bytes(half, 4)
    assert (half.flops, single.flops) == (165.2e12, 82.6e12)
    assert single.device_bandwidth == half.device_bandwidth
    cpu = machines.find_profile("epyc-2core")
    assert machines.for_element_bytes(cpu, 2) is cpu


def test_names_are_found_in_any_case_and_the_default_is_one():
    assert machines.find_profile("RTX 4090") is machines.NAMED_PROFILES[machines.DEFAULT_PROFILE]
    assert machines.find_profile("A100") is machines.NAMED_PROFILES["a100-80gb"]
    assert all(name == profile.name for name, profile in machines.NAMED_PROFILES.items())


@pytest.mark.parametrize(("name", "near"), TABLES["near"])
def test_an_unknown_name_gets_the_nearest_ones(name, near):
    with pytest.raises(InputError, match=f"--gpu {name}: no such profile") as caught:
        machines.find_profile(name)
    assert near in str(caught.value)


def test_a_card_of_ones_own():
    found = machines.find_profile("custom:12GB, 360GB/s, 25.5TFLOPS")
    assert found.name == "custom"
    assert found.device_memory_bytes == 12 * 10**9
    assert (found.device_bandwidth, found.flops) == (360e9, 25.5e12)
    assert found.h2d_bandwidth == 31.5e9
    for wrong in ("12GB", "12GB,360GB/s", "12GB,fast,25TFLOPS", "12G,360GB/s,25", "1GB,1GB/s,nan"):
        with pytest.raises(InputError, match=r"expected a form like custom:12GB,360GB/s,25TFLOPS$"):
            machines.find_profile(f"custom:{wrong}")


def test_measured_is_read_from_the_cache(tmp_path):
    file = tmp_path / "profile.json"
    with pytest.raises(InputError, match="beamwright doctor --probe"):
        machines.find_profile("measured", file)
    machines.write_profile(machines.NAMED_PROFILES["epyc-2core"], file)
    for name in ("measured", "cpu", "CPU"):
        assert machines.find_profile(name, file) == machines.NAMED_PROFILES["epyc-2core"]


@pytest.mark.parametrize(("device_name", "memory_gib", "name"), TABLES["called"])
def test_a_card_by_what_cuda_calls_it(device_name, memory_gib, name):
    found = machines.card_of_device(device_name, round(memory_gib * GIB))
    assert (found.name if found else "") == name


def test_kernels_need_bfloat16():
    without = {name for name, card in machines.CARDS.items() if not card.has_kernels}
    assert without == {"t4", *(name for name in machines.CARDS if name.startswith("rx-"))}


def test_the_cards_are_reckoned_alike():
    """Of GeForce cards, 16-bit products run at twice the rate of float32."""
    for name, card in machines.CARDS.items():
        assert card.source
        assert machines.NAMED_PROFILES[name].device_memory_bytes == card.memory_gib * GIB
        if name.startswith("rtx-"):
            assert card.tflops == pytest.approx(2 * card.float32_tflops, rel=0.01), name


def test_the_default_is_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    file = tmp_path / ".cache" / "beamwright" / "profile.json"
    assert machines.default_cache_file() == file
    assert machines.write_profile(PROFILE) == file
    assert machines.read_profile() == PROFILE
    assert [*file.parent.iterdir()] == [file], "no partial file"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        machines.write_profile(PROFILE, tmp_path / "file" / "profile.json")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "\xff", *(json.dumps({**asdict(PROFILE), **each}) for each in TABLES["broken"])],
)
def test_a_broken_file_is_named_with_what_to_do(tmp_path, text):
    file = tmp_path / "profile.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"profile\.json: not a hardware profile.*--probe"):
        machines.read_profile(file)

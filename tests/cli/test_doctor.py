from functools import partial

import pytest

from beamwright import __version__
from beamwright.checks.machine import matmul_libraries, measure_profile
from beamwright.plan.machines import HardwareProfile, default_cache_file, find_profile


def test_products_of_this_machine(monkeypatch):
    found = matmul_libraries()
    assert list(found) == ["float32", "bfloat16", "int8", "int4", "gguf", "least_rows"]
    assert found["least_rows"] in (1, 2, 8)
    assert found["int8"] == found["int4"] == found["gguf"]
    capabilities = {"avx512_bf16": True, "amx_bf16": True}
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    monkeypatch.setattr("beamwright.checks.machine.instructions", lambda: None)
    monkeypatch.setattr("beamwright.checks.machine.batches_are_exact", lambda *_: False)
    found = matmul_libraries()
    assert found["bfloat16"].endswith("(amx_bf16)")
    assert "(" not in found["float32"]
    assert found["int8"].startswith("dequantised")
    assert found["least_rows"] == 8


@pytest.mark.parametrize(
    ("tree", "dense", "hinted"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_an_exact_backend_is_named_where_the_default_is_not(cli, monkeypatch, tree, dense, hinted):
    checks = {"tree": tree, "dense": dense, "reference": True}
    checks |= {name: True for name in ("triton-tree", "triton-dense")}
    monkeypatch.setattr("beamwright.checks.machine.run_selftest", lambda: checks)
    report = cli("doctor", "--json").json
    assert report["beamwright"] == __version__
    assert report["selftest"] == checks
    assert "selftest: tree" in cli("doctor").out
    assert ("--attention dense is" in (report["hint"] or "")) == hinted


def test_a_probe_measures_shows_and_keeps_the_profile(cli, monkeypatch, tmp_path):
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    small = partial(measure_profile, part=16, repeats=1)
    monkeypatch.setattr("beamwright.checks.machine.measure_profile", small)
    monkeypatch.setattr("beamwright.checks.machine.inspect_machine", lambda: {"torch": "2.13"})
    report = cli("doctor", "--probe", "--json").json
    assert HardwareProfile(**report["profile"]) == find_profile("measured")
    assert report["profile_file"] == str(default_cache_file())
    assert "profile: device bandwidth" in cli("doctor", "--probe").out


def test_a_verifier_is_shown_with_where_it_reads(cli):
    report = cli("doctor", "--verifier", "bundled", "--show", "--json").json
    assert (report["format"], report["aggregate"]) == ("beamwright-prm", "prod")
    assert report["text"].startswith("<|bos|>")
    read = [at for step in report["steps"] for at in step["read_at"]]
    assert read == [*range(read[0], read[-1] + 1)]
    assert 0 < report["score"] < 1
    out = cli("doctor", "--verifier", "bundled", "--show").out
    assert "token_mlp" in out
    assert "tokens there" in out

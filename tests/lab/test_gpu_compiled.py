"""Kernels as a model's passes launch them, compiled for cards that are not here."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from beamwright_lab.gpu.report_compiled import MODELS, TARGETS, programs_of

PRODUCTS = ("multiply_parts", "multiply_gated")
ELEMENTWISE = ("add_norm_rows", "gate_rows", "add_parts")


def compiled(folder, models, *targets):
    """Every variant; Triton's cache is the user's, so that a second run compiles nothing."""
    file = folder / "compiled.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "beamwright_lab.gpu.report_compiled", "--json", str(file)]
    command += ["--models", *models, "--targets", *map(str, targets)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert file.exists(), found.stderr
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("k"), ("qwen2.5-1.5b", "qwen3.5-9b"), 90)


@pytest.mark.nightly
def test_products_and_elementwise_kernels_read_16_bytes_at_once(kernels):
    for row in kernels:
        if row["kernel"] in (*PRODUCTS, *ELEMENTWISE):
            assert row["narrow"] == 0 < row["wide"], row
        if row["kernel"] == "rotate_rows":
            assert row["narrow"] == 1, "a position"


@pytest.mark.nightly
def test_copies_are_under_way_while_a_tile_is_computed(kernels):
    for row in kernels:
        if row["kernel"] in (*PRODUCTS, "attend_parts", "attend_chunks"):
            assert max(row["ahead"]) >= 1, row
            assert row["unit"], row
        if row["kernel"] in PRODUCTS:
            assert row["unit"] == "wgmma", row


@pytest.mark.nightly
def test_programs_share_a_multiprocessor_of_an_h100(kernels):
    for row in kernels:
        if row["kernel"] not in ("attend_chunks", "add_norm_rows"):
            assert row["programs"] >= (3 if row["warps"] <= 4 else 1), row


@pytest.mark.nightly
def test_kernels_that_begin_early_read_nothing_that_may_be_written_still(kernels):
    """But weights, and lists that are written between tokens."""
    for row in kernels:
        if row["early"]:
            assert row["kernel"] in ("add_norm_rows", "attend_parts", "merge_rows"), row


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_of_any_model_spills_or_is_alone_on_any_card(tmp_path, target):
    """Two numbers of a thread may lie outside its registers."""
    rows = compiled(tmp_path, MODELS, target)
    known = {"attend_parts", "attend_chunks", "find_thresholds", "delta_rows", "scan_rows"}
    assert {row["kernel"] for row in rows} >= known
    most = {80: 16}.get(target, 8)  # bytes; on an A100 of `attend_chunks`, which has all registers
    assert [row for row in rows if row["stack_bytes"] > most] == []
    assert [row for row in rows if row["warps"] <= 4 and row["programs"] < 2] == []


def test_how_many_programs_fit():
    assert programs_of(90, 168, 64 * 1024, 4) == 3, "registers"
    assert programs_of(86, 32, 52 * 1024, 4) == 1, "memory to share"
    assert programs_of(86, 32, 0, 8) == 6, "threads"

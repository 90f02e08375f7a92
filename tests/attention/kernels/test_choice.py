"""Who runs the kernels: by name, by device, by dtype; and that they compile for a card."""

import json
import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from beamwright.attention import KERNEL_BACKENDS, kernels, make_attention
from beamwright.attention.kernels import (
    can_overlap,
    has_small_shared_memory,
    is_hopper,
    triton_version,
)
from beamwright.attention.kernels.worklist import (
    HeadLayout,
    decode_tile,
    power_of_two,
    prefill_tile,
)
from beamwright.errors import InputError

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "dtype", "chosen"),
    [
        ("auto", torch.bfloat16, "triton-tree"),
        ("tree", torch.bfloat16, "triton-tree"),
        ("dense", torch.bfloat16, "triton-dense"),
        ("reference", torch.bfloat16, "reference"),
        ("auto", torch.float64, "tree"),
        *((name, torch.float16, name) for name in KERNEL_BACKENDS),
    ],
)
def test_kernels_are_chosen_on_cuda_where_they_know_the_dtype(name, dtype, chosen):
    pytest.importorskip("triton")
    backend = make_attention(name, CUDA, dtype)
    assert (backend.name, make_attention("auto").name) == (chosen, "tree")
    assert backend.copies_per_beam is (chosen == "triton-dense")


def test_kernels_that_are_asked_for_are_not_replaced():
    with pytest.raises(InputError, match=r"^--attention triton-dense: .* (float64|not installed)"):
        make_attention("triton-dense", CUDA, torch.float64)


def test_without_triton_torch_runs_and_kernels_are_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton_version() is None
    assert make_attention("auto", CUDA, torch.float16).name == "tree"
    with pytest.raises(InputError, match=r"^--attention triton-tree: triton is not installed"):
        make_attention("triton-tree", CUDA, torch.float16)


@pytest.mark.parametrize(
    ("capability", "hip", "early", "hopper", "small"),
    [
        ((9, 0), None, True, True, False),
        ((12, 0), None, True, False, True),
        ((8, 9), None, False, False, True),
        ((8, 0), None, False, False, False),
        ((9, 4), "6.4", False, False, False),
    ],
)
def test_what_a_card_can_do_is_said_by_its_capability(
    monkeypatch, capability, hip, early, hopper, small
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(kernels, "_capability", kernels._capability.__wrapped__)
    assert (can_overlap(CUDA), is_hopper(CUDA), has_small_shared_memory(CUDA)) == (
        early,
        hopper,
        small,
    )
    assert not can_overlap(torch.device("cpu"))


@pytest.mark.parametrize("choose", [decode_tile, prefill_tile, partial(prefill_tile, hopper=True)])
def test_tiles_hold_whole_queries_and_their_stages_fit(choose):
    groups, head_dims = (1, 2, 3, 4, 6, 7, 8, 16, 71), (20, 64, 80, 96, 128, 256)
    for group, head_dim, element_bytes in product(groups, head_dims, (2, 4)):
        tile = choose(HeadLayout(2, group, head_dim), element_bytes)
        assert tile.queries == tile.pairs // group >= 1
        assert tile.pairs == power_of_two(tile.pairs) >= 16
        assert tile.dim == power_of_two(tile.dim) >= head_dim
        assert tile.tokens % 16 == 0
        if group <= 16 or head_dim <= 64:  # no model has wide heads in larger groups
            held = 2 * (tile.stages - 1) * tile.tokens * tile.dim
            held += tile.pairs * (tile.dim + tile.tokens)
            most_kib = 99 if choose in (decode_tile, prefill_tile) else 227
            assert held * element_bytes <= most_kib * 1024


@pytest.fixture
def compiled(tmp_path):
    """What `compile_kernels` says."""
    pytest.importorskip("triton")

    def compile_for(*arguments):
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        script = Path(__file__).with_name("compile_kernels.py")
        found = subprocess.run(
            [sys.executable, script, *arguments], env=environment, capture_output=True, check=False
        )
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    return compile_for


@pytest.mark.nightly
@pytest.mark.parametrize("kinds", [("all", "fp8", "wide-int8"), ("plain", "wide", "int8")])
def test_the_kernels_compile_for_a_card_that_is_not_there(compiled, kinds):
    """The interpreter does not check types as the compiler does. An RTX 30 has 99 KiB to share."""
    report = compiled("86", *kinds)
    for name, kind in product(("attend_parts", "attend_chunks", "merge_rows"), kinds):
        built = report[f"{name} {kind}"]
        assert built["shared_bytes"] <= 99 * 1024
        assert (built["unit"] == "mma.sync") == (name != "merge_rows")
        assert built["stack_bytes"] == 0
    assert report["interpreted"] is False
    assert report["on_cpu"].startswith("Triton compiles for CUDA, not for cpu")


@pytest.mark.nightly
def test_what_the_kernel_ahead_writes_is_read_behind_the_wait_for_it(compiled):
    """Before it, lists, a number at a time: no KV is copied, no query or partial result read."""
    report, lists = compiled("90", "plain"), ["ld.global.b32"]
    assert report["attend_parts plain"]["early"] == [lists] * 2  # a tail's, and an item's
    assert report["merge_rows plain"]["early"] == [lists]
    assert report["attend_chunks plain"]["early"] == []

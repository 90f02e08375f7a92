"""What `--dtype auto` means."""

from dataclasses import replace

import pytest
import torch

from beamwright.attention import make_attention
from beamwright.models import load as precision
from beamwright.models.load import resolve_dtype
from beamwright.models.named import shape_from_text

SMALL = shape_from_text(
    "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=96,vocab=99,context=128"
)
LARGE = replace(SMALL, vocab=2_000_000, stored_bfloat16=True)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("invariant", [True, False])
def test_a_large_checkpoint_in_bfloat16_stays_in_it_where_that_is_fast_and_exact(
    monkeypatch, fast, invariant
):
    monkeypatch.setattr(precision, "has_bfloat16", lambda: fast)
    monkeypatch.setattr(precision, "products_are_invariant", lambda *_: invariant)
    expected = torch.bfloat16 if fast and invariant else torch.float32
    assert resolve_dtype("auto", "cpu", LARGE) == expected
    assert resolve_dtype("auto", "cpu", replace(LARGE, stored_bfloat16=False)) == torch.float32
    assert resolve_dtype("auto", "cpu", replace(SMALL, stored_bfloat16=True)) == torch.float32


def test_what_is_asked_for_is_taken_and_a_card_computes_in_bfloat16():
    for name in ("float32", "float64", "float16", "bfloat16"):
        assert resolve_dtype(name, "cpu", LARGE) == getattr(torch, name)
    assert resolve_dtype("auto", "cuda", SMALL) == torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "dtype", "backend"),
    [((7, 5), torch.float16, "tree"), ((8, 0), torch.bfloat16, "triton-tree")],
)
def test_a_card_without_matrix_units_for_bfloat16_computes_in_float16_without_kernels(
    monkeypatch, capability, dtype, backend
):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = resolve_dtype("auto", "cuda", SMALL)
    assert found == dtype
    assert make_attention("auto", torch.device("cuda"), found).name == backend

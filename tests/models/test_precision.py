"""What `--dtype auto` means."""

from dataclasses import replace

import pytest
import torch

from beamwright.attention import make_attention
from beamwright.models import load as precision
from beamwright.models.load import products_are_invariant, resolve_dtype, why_float32
from beamwright.models.shape import shape_from_text

SMALL = shape_from_text(
    "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=96,vocab=99,context=128"
)
LARGE = replace(SMALL, vocab=2_000_000, stored_bfloat16=True)


@pytest.fixture
def this_cpu(monkeypatch):
    def is_a_cpu(*, has_bfloat16, is_invariant):
        monkeypatch.setattr(precision, "has_bfloat16", lambda: has_bfloat16)
        monkeypatch.setattr(precision, "products_are_invariant", lambda *_: is_invariant)

    return is_a_cpu


def test_a_large_checkpoint_in_bfloat16_stays_in_it_where_that_is_fast_and_exact(this_cpu):
    this_cpu(has_bfloat16=True, is_invariant=True)
    assert resolve_dtype("auto", "cpu", LARGE) == torch.bfloat16
    assert why_float32(LARGE) is None
    assert resolve_dtype("auto", "cpu", replace(LARGE, stored_bfloat16=False)) == torch.float32
    assert resolve_dtype("auto", "cpu", replace(SMALL, stored_bfloat16=True)) == torch.float32


def test_where_bits_would_depend_on_the_batch_it_is_float32_and_said(this_cpu):
    this_cpu(has_bfloat16=True, is_invariant=False)
    assert resolve_dtype("auto", "cpu", LARGE) == torch.float32
    assert "--dtype bfloat16 is faster on this CPU" in why_float32(LARGE)
    assert why_float32(SMALL) is None


def test_a_cpu_without_it_computes_in_float32(this_cpu):
    this_cpu(has_bfloat16=False, is_invariant=True)
    assert resolve_dtype("auto", "cpu", LARGE) == torch.float32
    assert why_float32(LARGE) is None


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


def test_products_that_follow_the_batch_are_found(monkeypatch):
    products_are_invariant.cache_clear()
    assert products_are_invariant(((24, 40),), torch.float64)

    def follows(linear):
        return lambda x: linear(x) + len(x) // 64

    monkeypatch.setattr(precision, "prepack", follows)
    products_are_invariant.cache_clear()
    assert not products_are_invariant(((24, 40),), torch.float64)
    products_are_invariant.cache_clear()


def test_a_cpu_is_asked_what_it_has(monkeypatch):
    for found, expected in [
        ({"amx_bf16": True}, True),
        ({"avx512_bf16": False}, False),
        ({}, False),
    ]:
        precision.has_bfloat16.cache_clear()
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found, raising=False)
        assert precision.has_bfloat16() is expected
    precision.has_bfloat16.cache_clear()

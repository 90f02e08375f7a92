"""KV in 8 bits: rounding once is rounding for good, and blocks hold what was rounded."""

import pytest
import torch

from beamwright.attention.protocols import AttentionView
from beamwright.kv.codes import dequantise, hadamard_matrix, quantise, round_to_grid
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.store import SegmentStore
from beamwright.models.decoder import QuantisingView
from engines import random_decoder

KINDS = ["int8", "fp8"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CLOSE = {"int8": 1 / 127, "fp8": 1 / 16}  # of the largest number of a head, of a number


def drawn(dtype, seed=0):
    """Vectors of all sizes that a dtype knows, zeros and single numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(4000, 3, 20, generator=generator, dtype=torch.float64)
    sizes = torch.randint(-14, 12, (4000, 1, 1), generator=generator)
    values *= torch.exp2(sizes.double())
    values[::7, :, 1:] = 0
    values[::11] = 0
    values[1::13] = values[1::13].sign() * torch.exp2(sizes[1::13].double())
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_rounded_is_rounded_to_itself_and_coded_exactly(kind, dtype):
    values = drawn(dtype)
    once = round_to_grid(values, kind)
    assert torch.equal(round_to_grid(once, kind), once)
    codes, exponents = quantise(once, kind)
    assert (codes.dtype, exponents.dtype) == (torch.int8, torch.int8)
    read = dequantise(codes, exponents, kind, dtype)
    assert torch.equal(read, once)
    assert torch.equal(dequantise(*quantise(read, kind), kind, dtype), once)
    assert torch.equal(dequantise(*quantise(values, kind), kind, dtype), once)
    largest = values.double().abs().amax(-1, keepdim=True)
    limit = largest if kind == "int8" else values.double().abs() + largest / 2**12
    assert ((once.double() - values.double()).abs() <= CLOSE[kind] * limit).all()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_beyond_float16_are_cut_and_not_infinite(kind):
    values = torch.full((2, 8), 65504.0, dtype=torch.float16)
    found = round_to_grid(values, kind)
    assert (found > 57000).all()
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("head_dim", [1, 5, 16, 32, 64, 80, 96, 128, 256])
def test_turned_queries_and_keys_have_the_same_products(head_dim):
    matrix, part = hadamard_matrix(head_dim)
    assert torch.equal(matrix.bfloat16().float(), matrix), "exact in the narrowest dtype"
    product = matrix.double() @ matrix.double().T * part
    assert torch.equal(product, torch.eye(head_dim, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_store_gives_back_what_was_rounded_from_blocks_of_fewer_bytes(kind, dtype):
    plain = KVLayout(2, 3, 16, dtype, block_tokens=4)
    layout = KVLayout(2, 3, 16, dtype, block_tokens=4, kept=kind)
    assert layout.bytes_per_token == 2 * 2 * 3 * 17
    assert layout.read_bytes_per_token == plain.bytes_per_token
    store = SegmentStore(BlockPool([layout], ByteBudget(6 * layout.bytes_per_block)))
    assert store.pool.num_blocks == 6
    values = torch.randn(11, 2, 2, 3, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    segment = store.create()
    store.append([segment], [values[:6]])
    store.append([segment], [values[6:]])
    expected = round_to_grid(values, kind)
    assert torch.equal(store.gather(segment, 11), expected.permute(1, 2, 0, 3, 4))


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_row_is_turned_alike_in_any_batch(head_dim, dtype):
    size = f"layers=1,hidden=32,heads=4,kv_heads=4,intermediate=8,vocab=8,head_dim={head_dim}"
    decoder = random_decoder(f"llama,{size},context=64", dtype)
    decoder.set_kv_dtype("int8")
    view = QuantisingView(AttentionView(), decoder)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1024, 4, head_dim, generator=generator).to(dtype)
    whole = view.rotate(vectors)
    for count in (8, 16, 24, 72, 256):
        assert torch.equal(view.rotate(vectors[:count]), whole[:count])
        assert torch.equal(view.rotate(vectors[-count:]), whole[-count:])

import pytest
import torch

from beamwright.attention.partial import (
    attend_few,
    attend_part,
    attend_part_oracle,
    hide,
    merge_parts,
)

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}


def draw(*size, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def rows_first(*part):
    """`attend_few` with `attend_part`'s order of dimensions."""
    return tuple(found.transpose(1, 2) for found in attend_few(*part))


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("items", "kv_heads", "rows", "tokens", "head_dim"),
    [(1, 1, 1, 1, 8), (3, 2, 8, 16, 12), (2, 3, 5, 33, 40), (4, 1, 16, 600, 80)],
)
@pytest.mark.parametrize("attend", [attend_part, rows_first])
def test_fast_attention_equals_its_oracle(
    attend, dtype, masked, items, kv_heads, rows, tokens, head_dim
):
    query = draw(items, kv_heads, rows, head_dim, dtype=dtype)
    key, value = (draw(items, kv_heads, tokens, head_dim, seed=s, dtype=dtype) for s in (1, 2))
    mask = None
    if masked:
        mask = torch.zeros(items, 1, rows, tokens, dtype=dtype)
        hidden = draw(items, 1, rows, tokens, seed=3) > 0
        hidden[..., 0] = False
        mask.masked_fill_(hidden, float("-inf"))
    context, lse = attend(query, key, value, mask)
    expected, expected_lse = attend_part_oracle(query, key, value, mask)
    assert (context.shape, context.dtype) == ((items, rows, kv_heads, head_dim), dtype)
    assert (context - expected).abs().max() < CLOSE[dtype]
    assert (lse - expected_lse).abs().max() < CLOSE[dtype]


def test_the_oracle_is_softmax_attention():
    query, key, value = draw(1, 1, 4, 8), draw(1, 1, 9, 8, seed=1), draw(1, 1, 9, 8, seed=2)
    context, lse = attend_part_oracle(query, key, value, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert (context.transpose(1, 2) - expected).abs().max() < 1e-12
    scores = (query @ key.mT / 8**0.5).exp().sum(-1).log()
    assert (lse.transpose(1, 2) - scores).abs().max() < 1e-12


@pytest.mark.parametrize("cuts", [[5], [1, 4], [2, 3, 11, 7]])
def test_merged_parts_equal_the_whole(cuts):
    tokens = sum(cuts)
    query, key, value = (draw(3, 2, n, 8, seed=n) for n in (4, tokens, tokens))
    value = draw(3, 2, tokens, 8, seed=99)
    parts = [
        attend_part(query, k.contiguous(), v.contiguous(), None)
        for k, v in zip(key.split(cuts, dim=2), value.split(cuts, dim=2), strict=True)
    ]
    absent = (torch.full_like(parts[0][0], 1e6), torch.full_like(parts[0][1], float("-inf")))
    expected, _ = attend_part_oracle(query, key, value, None)
    merged = []
    for pieces in (parts, [*parts, absent, absent]):
        context = torch.stack([c for c, _ in pieces], dim=1)
        lse = torch.stack([s for _, s in pieces], dim=1)
        merged.append(merge_parts(context, lse))
    assert (merged[0] - expected).abs().max() < 1e-12
    assert torch.equal(*merged), "an absent part changes no bit"


@pytest.mark.parametrize("attend", [attend_part, attend_part_oracle])
def test_a_part_that_is_not_seen_has_no_weight_and_is_a_number(attend):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 8, 16, generator=generator)
    keys, values = torch.randn(2, 1, 2, 32, 16, generator=generator).unbind()
    mask = torch.zeros(1, 1, 8, 32)
    mask[:, :, :3] = -torch.inf
    blind = mask.isinf().all(-1).squeeze(1)
    context, lse = hide(attend(query, keys, values, mask), blind)
    assert torch.equal(context[:, :3], torch.zeros(1, 3, 2, 16))
    assert lse[:, :3].isneginf().all()
    assert lse[:, 3:].isfinite().all()
    seen, _ = attend(query, keys, values, None)
    assert (context[:, 3:] - seen[:, 3:]).abs().max() < 1e-6

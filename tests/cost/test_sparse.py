"""AsyncSpade's printed numbers from its equations."""

import pytest

from beamwright.cost.sparse import (
    MIB,
    AttentionShape,
    SparseMethod,
    cache_rank_flops,
    pack_bandwidth,
    token_flops,
)

QWEN3_8B = AttentionShape(36, 4096, 32, 8, 128, 12288)
QWEN3_32B = AttentionShape(64, 5120, 64, 8, 128, 25600)
CONTEXT, SELECTED = 32768, 2048


@pytest.mark.parametrize(
    ("shape", "printed"),
    [(QWEN3_8B, (33.2, 24.8, 15.7, 15.1)), (QWEN3_32B, (131.1, 101.1, 68.9, 66.7))],
)
def test_flops_of_a_token_are_the_paper_s(shape, printed):
    found = [token_flops(shape, method, CONTEXT, SELECTED) / 1e9 for method in SparseMethod]
    assert found == pytest.approx(printed, abs=0.06)


@pytest.mark.parametrize("shape", [QWEN3_8B, QWEN3_32B])
def test_both_ranks_together_take_what_scoring_with_the_true_query_takes(shape):
    inference = token_flops(shape, SparseMethod.ASYNCSPADE, CONTEXT, SELECTED)
    both = inference + cache_rank_flops(shape, CONTEXT)
    assert both == token_flops(shape, SparseMethod.EXACT, CONTEXT, SELECTED)


@pytest.mark.parametrize(
    ("shape", "batch", "selected", "layers", "ms", "printed", "off"),
    [
        (QWEN3_8B, 8, 2048, 6, 7.13, 107.71, 0.0002),
        (QWEN3_8B, 8, 2048, 12, 10.94, 140.40, 0.0002),
        (QWEN3_8B, 16, 1024, 6, 7.30, 105.20, 0.0002),
        (QWEN3_8B, 16, 1024, 12, 11.82, 129.94, 0.0002),
        (QWEN3_32B, 8, 2048, 4, 6.30, 159.49, 0.02),
        (QWEN3_32B, 8, 2048, 8, 8.78, 228.88, 0.02),
    ],
)
def test_table_two_counts_query_heads_in_mebibytes(
    shape, batch, selected, layers, ms, printed, off
):
    found = pack_bandwidth(
        shape, batch=batch, selected=selected, layers=layers, seconds=ms / 1e3, heads=shape.heads
    )
    assert found / MIB / 1e3 == pytest.approx(printed, rel=off)


@pytest.mark.parametrize(
    ("shape", "layers", "ms", "needed"), [(QWEN3_8B, 6, 7.13, 56.5), (QWEN3_32B, 4, 6.30, 42.6)]
)
def test_keys_and_values_need_another_bandwidth(shape, layers, ms, needed):
    found = pack_bandwidth(
        shape, batch=8, selected=2048, layers=layers, seconds=ms / 1e3, heads=2 * shape.kv_heads
    )
    assert found / 1e9 == pytest.approx(needed, rel=0.01)

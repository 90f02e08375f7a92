"""AsyncSpade's printed numbers from its equations, and the roofline beside them."""

from dataclasses import replace

import pytest

from beamwright.models.named import NAMED_SHAPES, shape_from_text
from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.machines import find_profile
from beamwright_lab.studies.sparse import (
    SparseLoad,
    SparseMethod,
    cache_rank_flops,
    decode_seconds,
    pack_bandwidth,
    token_flops,
    two_devices,
)

QWEN3_8B = NAMED_SHAPES["qwen3-8b"]
QWEN3_32B = shape_from_text(
    "qwen3,layers=64,hidden=5120,heads=64,kv_heads=8,head_dim=128,intermediate=25600,"
    "vocab=151936,context=40960"
)
CONTEXT, SELECTED = 32768, 2048
LOAD = SparseLoad(8, CONTEXT, SELECTED)
PAPER = (SparseMethod.FULL, SparseMethod.EXACT, SparseMethod.QUEST, SparseMethod.ASYNCSPADE)

MIB = 2**20


def at_peak(shape, card="a100"):
    """The roofline of a card's data sheet: all of its rates, free launches."""
    shares = {"bandwidth_share": 1.0, "flops_share": 1.0, "link_share": 1.0, "launch_s": 1e-12}
    return Roofline(ModelCosts.of(shape, 2), replace(find_profile(card), **shares))


def milliseconds(shape, load=LOAD, methods=PAPER):
    return [1e3 * decode_seconds(at_peak(shape), shape, method, load) for method in methods]


@pytest.mark.parametrize(
    ("shape", "printed"),
    [(QWEN3_8B, (33.2, 24.8, 15.7, 15.1)), (QWEN3_32B, (131.1, 101.1, 68.9, 66.7))],
)
def test_flops_of_a_token_are_the_paper_s(shape, printed):
    found = [token_flops(shape, method, CONTEXT, SELECTED) / 1e9 for method in PAPER]
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


def test_the_cache_rank_hides_up_to_a_context():
    """Where it reads keys and moves the selection in the time of weights and selection."""

    def hidden(shape, seen):
        load = replace(LOAD, context=round(seen / 8))
        return two_devices(at_peak(shape), shape, load, link).hidden

    link = 1e15
    for shape in (QWEN3_8B, QWEN3_32B):
        model = at_peak(shape).model
        most = 2 * model.weight_bytes / model.kv_bytes_per_token - 2 * LOAD.chosen
        assert hidden(shape, 0.999 * most)
        assert not hidden(shape, 1.001 * most)
    link = 250e9  # the paper's, A100
    assert not hidden(QWEN3_8B, LOAD.seen)
    assert hidden(QWEN3_32B, LOAD.seen)

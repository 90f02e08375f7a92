"""AsyncSpade's printed numbers from its equations, the roofline beside them, claims of cost."""

from dataclasses import replace

import pytest

from beamwright_lab.sparse import paper
from beamwright_lab.studies.sparse import (
    SparseLoad,
    SparseMethod,
    cache_rank_flops,
    token_flops,
    two_devices,
)

QWEN3_8B, QWEN3_32B = paper.MODELS.values()
CONTEXT, SELECTED = 32768, 2048
LOAD = SparseLoad(8, CONTEXT, SELECTED)
PAPER = (SparseMethod.FULL, SparseMethod.EXACT, SparseMethod.QUEST, SparseMethod.ASYNCSPADE)


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


def test_the_cache_rank_hides_up_to_a_context():
    """Where it reads keys and moves the selection in the time of weights and selection."""

    def hidden(shape, seen):
        load = replace(LOAD, context=round(seen / 8))
        return two_devices(paper.at_peak(shape, "a100"), shape, load, link).hidden

    link = 1e15
    for shape in (QWEN3_8B, QWEN3_32B):
        model = paper.at_peak(shape, "a100").model
        most = 2 * model.weight_bytes / model.kv_bytes_per_token - 2 * LOAD.chosen
        assert hidden(shape, 0.999 * most)
        assert not hidden(shape, 1.001 * most)
    link = 250e9  # the paper's, A100
    assert not hidden(QWEN3_8B, LOAD.seen)
    assert hidden(QWEN3_32B, LOAD.seen)


def test_table_two_is_recomputed_and_all_of_it_is_hidden():
    rows = list(paper.bandwidth_and_packs())
    assert len(rows) == 16
    for row in rows:
        assert row["query heads, MiB/ms"] == pytest.approx(row["printed GB/s"], rel=0.02)
        assert row["waits, ms"] == 0
        assert row["slack of a pack, ms"] > 0
    assert min(row["slack of a pack, ms"] for row in rows) == 0.17


def test_quest_s_bounds_are_a_small_part_of_the_overhead_that_the_claim_needs():
    for row in paper.times():
        needed, bounds = row["quest's own overhead for -20 %"], row["the roofline's"]
        assert needed > 8 * bounds
        assert row["asyncspade"] == row["quest, 2 devices"]


def test_selection_is_at_most_half_of_the_bytes():
    shares = [share for row in paper.selection_share() for key, share in row.items() if "k" in key]
    assert max(shares) < 50
    assert min(shares) < 1

"""The tables about AsyncSpade's claims of cost."""

import pytest

from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.machines import find_profile
from beamwright_lab.sparse import paper


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


def test_locality_takes_longer_where_it_needs_more_groups():
    shape = paper.NAMED_SHAPES["llama-3.1-8b"]
    roofline = Roofline(ModelCosts.of(shape, 2), find_profile("rtx-4090-x16"))
    kv_bytes = 64 * 768 * roofline.model.kv_bytes_per_token
    budgets = (kv_bytes, kv_bytes // 4, kv_bytes // 128)
    whole, parts, none = (paper.locality(shape, roofline, each, 512, 1) for each in budgets)
    assert whole < parts
    assert none is None

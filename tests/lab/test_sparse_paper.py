"""The tables about AsyncSpade's claims of cost."""

import pytest

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

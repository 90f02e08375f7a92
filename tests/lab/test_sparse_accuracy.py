"""Accuracy against budget: what is run, and what one row says."""

from beamwright_lab.sparse.accuracy import METHODS, ledger_cell, selects


def test_full_attention_has_no_budget_and_tova_only_numbers():
    assert selects(METHODS["full attention"], [32, 0.25]) == [None]
    assert selects(METHODS["tova"], [32, 0.25]) == [32]
    assert selects(METHODS["exact"], [32, 0.25]) == [32, 0.25]


def test_a_row_has_the_shares_of_both_variants_and_what_was_left_out():
    shown = ledger_cell(128, 1, 0)({"sparse": "window", "select": 24, "sparse_from": 0})
    assert 24 < shown["visible"] < 128
    assert shown["left out"] is None
    assert {f"{variant} recall" for variant in ("plain", "announced")} <= set(shown)

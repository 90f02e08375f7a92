"""Accuracy against budget: what is run, and what one row says; bounds of pages are bounds."""

from types import SimpleNamespace

import pytest
import torch

from beamwright_lab.sparse.accuracy import METHODS, ledger_cell, selects
from beamwright_lab.sparse.predict import Forward


def test_full_attention_has_no_budget_and_tova_only_numbers():
    assert selects(METHODS["full attention"], [32, 0.25]) == [None]
    assert selects(METHODS["tova"], [32, 0.25]) == [32]
    assert selects(METHODS["exact"], [32, 0.25]) == [32, 0.25]


def test_a_row_has_the_shares_of_both_variants_and_what_was_left_out():
    shown = ledger_cell(128, 1, 0)({"sparse": "window", "select": 24, "sparse_from": 0})
    assert 24 < shown["visible"] < 128
    assert shown["left out"] is None
    assert {f"{variant} recall" for variant in ("plain", "announced")} <= set(shown)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_bounds_of_pages_are_at_least_the_scores_and_those_of_open_pages_are(page):
    torch.manual_seed(0)
    decoder = SimpleNamespace(_before=None, shape=SimpleNamespace(kv_heads=1))
    forward = Forward(decoder, None, 0.25, page=page)
    query, keys = torch.randn(37, 2, 8), torch.randn(2, 37, 8)
    own = forward._scores(query, keys)
    bounds = forward._bounds(query, keys, own)
    assert (bounds >= own - 1e-5).all()
    open_pages = torch.arange(37)[None] >= (torch.arange(1, 38) // page * page)[:, None]
    assert torch.equal(bounds[:, open_pages], own[:, open_pages])
    if page == 1:
        torch.testing.assert_close(bounds, own)

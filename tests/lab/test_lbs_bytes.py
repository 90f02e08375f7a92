"""Bytes over the link by the LBS paper's analytic case, in each of its conventions."""

import pytest

from beamwright_lab.studies.lbs import (
    LbsCase,
    layerwise_bytes,
    locality_bytes,
    locality_printed_bytes,
    locality_start_bytes,
)

GIB = 2**30
EVERY = (layerwise_bytes, locality_bytes, locality_start_bytes)


def case(kv_budget_bytes=7 * GIB, step_tokens=32):
    return LbsCase(32, 512 * 1024, 64, 128, 1920, step_tokens, kv_budget_bytes)


@pytest.mark.parametrize("step_tokens", [32, 64, 128])
def test_layerwise_is_the_papers_figure_whatever_the_step(step_tokens):
    assert round(layerwise_bytes(case(step_tokens=step_tokens)) / GIB) == 53_012


@pytest.mark.parametrize(
    ("step_tokens", "figure_7", "printed", "start"),
    [(32, 2052, 2010, 1995), (64, 1044, 990, 986), (128, 540, 480, 480)],
)
def test_locality_in_each_convention(step_tokens, figure_7, printed, start):
    steps = case(step_tokens=step_tokens)
    assert round(locality_bytes(steps) / GIB) == figure_7
    assert round(locality_printed_bytes(steps) / GIB) == printed
    assert round(locality_start_bytes(steps) / GIB) == start


def test_a_search_that_fits_moves_nothing_but_in_the_printed_form():
    # 64 beams of 2048 tokens are 64 GiB.
    assert [bytes_of(case(kv_budget_bytes=64 * GIB)) for bytes_of in EVERY] == [0, 0, 0]
    assert locality_bytes(case(kv_budget_bytes=64 * GIB - 1)) == 64 * GIB
    assert locality_printed_bytes(case(kv_budget_bytes=64 * GIB)) == 2010 * GIB

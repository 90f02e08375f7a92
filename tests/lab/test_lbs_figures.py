"""The tables of the LBS paper's figures and of the fair baselines."""

from dataclasses import replace

import pytest

from beamwright.plan.costs import Layout
from beamwright_lab.lbs import figures
from beamwright_lab.lbs.cases import (
    BASELINE,
    LBS,
    LOCALITY,
    OURS,
    SimulatedCase,
    simulate,
)
from beamwright_lab.studies import lbs

SMALL = SimulatedCase(num_beams=4, kv_bytes=2**30)


def test_prefix_reuse_and_then_reuse_between_steps_load_less():
    alone, prefetch, published, ours = (simulate(SMALL, v).h2d_bytes for v in LOCALITY)
    assert min(alone, prefetch) > published > ours > 0
    assert alone < 0.1 * simulate(SMALL, BASELINE).h2d_bytes, "once a step, not once a token"


@pytest.mark.parametrize(
    ("model", "gpu", "link"),
    [
        ("opt-6.7b", "rtx-4090", "nominal"),
        ("llama-2-7b", "rtx-4090", "nominal"),
        ("qwen1.5-7b", "rtx-4090", "nominal"),
        ("opt-2.7b", "rtx-3080-ti", "x8"),
        ("qwen1.5-4b", "rtx-3080-ti", "x8"),
    ],
)
def test_lbs_is_faster_than_layerwise_on_every_model_and_card(model, gpu, link):
    case = replace(SMALL, model=model, gpu=gpu, link=link)
    assert simulate(case, BASELINE).time_s > 1.5 * simulate(case, LBS).time_s


def test_longer_steps_win():
    longer = replace(SMALL, step_tokens=128)
    assert simulate(longer, LBS).h2d_bytes < simulate(SMALL, LBS).h2d_bytes
    assert figures.speedup(longer, LBS) > figures.speedup(SMALL, LBS)


def test_figure_7_is_reproduced_by_the_equations():
    rows = [row for row in figures.figure_7(quick=True) if "Eq." in row.what]
    assert [row.verdict for row in rows] == ["exact"] * 4


@pytest.mark.parametrize("passes", [1, 12])
def test_the_fitted_constant_moves_what_reads_copies_and_nothing_else(passes):
    changed = SimulatedCase(num_beams=4, kv_bytes=2**30, copies_passes=passes)
    slower = simulate(changed, LBS).time_s > simulate(SMALL, LBS).time_s
    assert slower == (passes > 6)
    tree = Layout.TREE
    assert simulate(changed, OURS, tree).time_s == simulate(SMALL, OURS, tree).time_s


# --- bytes over the link by the analytic case, in each convention -------------------------------

GIB = 2**30
EVERY = (lbs.layerwise_bytes, lbs.locality_bytes, lbs.locality_start_bytes)


def case(kv_budget_bytes=7 * GIB, step_tokens=32):
    return lbs.LbsCase(32, 512 * 1024, 64, 128, 1920, step_tokens, kv_budget_bytes)


@pytest.mark.parametrize("step_tokens", [32, 64, 128])
def test_layerwise_is_the_papers_figure_whatever_the_step(step_tokens):
    assert round(lbs.layerwise_bytes(case(step_tokens=step_tokens)) / GIB) == 53_012


@pytest.mark.parametrize(
    ("step_tokens", "figure_7", "printed", "start"),
    [(32, 2052, 2010, 1995), (64, 1044, 990, 986), (128, 540, 480, 480)],
)
def test_locality_in_each_convention(step_tokens, figure_7, printed, start):
    steps = case(step_tokens=step_tokens)
    assert round(lbs.locality_bytes(steps) / GIB) == figure_7
    assert round(lbs.locality_printed_bytes(steps) / GIB) == printed
    assert round(lbs.locality_start_bytes(steps) / GIB) == start


def test_a_search_that_fits_moves_nothing_but_in_the_printed_form():
    # 64 beams of 2048 tokens are 64 GiB.
    assert [bytes_of(case(kv_budget_bytes=64 * GIB)) for bytes_of in EVERY] == [0, 0, 0]
    assert lbs.locality_bytes(case(kv_budget_bytes=64 * GIB - 1)) == 64 * GIB
    assert lbs.locality_printed_bytes(case(kv_budget_bytes=64 * GIB)) == 2010 * GIB

"""The tables of the LBS paper's figures and of the fair baselines."""

import pytest

from beamwright.plan.costs import Layout
from beamwright_lab.paper import figures
from beamwright_lab.paper.cases import LBS, LOCALITY, OURS, VARIANTS, SimulatedCase, simulate
from beamwright_lab.peers import fair_baselines

SMALL = SimulatedCase(num_beams=4, kv_bytes=2**30)


def test_lbs_as_published_is_algorithm_1_with_nothing_kept():
    options = VARIANTS[LBS].options
    assert (options["planner"], options["reuse"]) == ("greedy", False)
    assert set(VARIANTS[OURS].options) == {"schedule"}, "ours is the default"


def test_prefix_reuse_and_then_reuse_between_steps_load_less():
    alone, prefetch, published, ours = (simulate(SMALL, v).h2d_bytes for v in LOCALITY)
    assert min(alone, prefetch) > published > ours > 0


def test_figure_7_is_reproduced_by_the_equations():
    rows = [row for row in figures.figure_7(quick=True) if "Eq." in row.what]
    assert [row.verdict for row in rows] == ["exact"] * 4


def test_a_fitted_hit_says_so():
    assert figures.verdict(True, fitted=True) == "fitted"
    assert figures.verdict(False, fitted=True) == "miss"


@pytest.mark.parametrize("passes", [1, 12])
def test_the_fitted_constant_moves_what_reads_copies_and_nothing_else(passes):
    changed = SimulatedCase(num_beams=4, kv_bytes=2**30, copies_passes=passes)
    slower = simulate(changed, LBS).time_s > simulate(SMALL, LBS).time_s
    assert slower == (passes > 6)
    tree = Layout.TREE
    assert simulate(changed, OURS, tree).time_s == simulate(SMALL, OURS, tree).time_s


def test_attention_on_the_host_costs_what_the_device_does_not_hold():
    case = fair_baselines.Case("MHA", 64, 32)
    copies, shared = (fair_baselines.host_attention_s(case, layout) for layout in Layout)
    # Figure 7's 53,012 GiB, whole layers, at the host's bandwidth; some tokens' KV fits.
    streamed_s = 53_012 * 2**30 / fair_baselines.HOST_BANDWIDTH
    assert 0.9 * streamed_s < copies < 1.2 * streamed_s
    assert shared < 0.1 * copies


def cell(time_s):
    return {"time_s": time_s, "h2d_bytes": 0, "d2h_bytes": 0, "recomputed_tokens": 7}


def test_the_fair_baseline_is_the_strongest_engine():
    row = {name: cell(9.0) for name in fair_baselines._OURS}
    row |= {"locality, shared": cell(2.0), "layer-wise, copies": None, "kv_budget_bytes": 2**30}
    engines = {
        "vllm": (9, 5),
        "vllm-offload": (8, 4),
        "sglang": (7, 3),
        "sglang-hicache": (6, 5),
        "sglang-write-back": (8, 8),
    }
    row |= {name: [cell(t) for t in times] for name, times in engines.items()}
    row["clairvoyant"] = [cell(6.0), cell(1.0)]
    found = fair_baselines.table_row(fair_baselines.Case("MHA", 64, 32), row)
    assert found["layer-wise, copies"] == "no fit"
    assert found["engines as they read"] == "3.00"
    assert found["strongest fair"] == "1.50 (sglang)"
    assert found["Belady"] == "0.50"
    assert found["recompute, once"] == "1.50 S (7 tok)"
    assert found["offload, once"] == "2.00 V (0 / 0)"

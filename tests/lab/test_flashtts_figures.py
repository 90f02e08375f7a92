"""The figures' comparison on a small search: what may not depend on how it is run."""

from dataclasses import replace

import pytest

from beamwright.plan.machines import find_profile
from beamwright_lab.flashtts import figures
from beamwright_lab.flashtts.baseline import Workload, baseline_of, simulate_baseline
from beamwright_lab.flashtts.split import PAIRS, plan_rows

WORK = Workload(generate_tokens=256, step_tokens=64)


@pytest.fixture(scope="module")
def runs():
    case = baseline_of("1.5B+1.5B", WORK.tree(16), 16)
    return figures.compare(case, WORK, figures.VARIANTS)


def test_every_variant_runs_the_search(runs):
    assert set(figures.VARIANTS) < set(runs)
    assert runs["baseline, uncached"].goodput <= runs["baseline"].goodput
    for run in runs.values():
        assert run.time_s == pytest.approx(run.decode_s + run.verify_s)


def test_where_all_fits_order_and_split_change_nothing_and_speculation_gains(runs):
    assert runs["strong"] == runs["P"] == runs["P+M"]
    assert runs[figures.FULL] == runs["M+S"] == runs["P+S"]
    assert runs[figures.FULL].goodput > runs["strong"].goodput


def test_what_is_gained_ahead_rests_on_uneven_steps():
    gains = []
    for sigma in (0.0, 0.9):
        work = replace(WORK, step_sigma=sigma)
        case = baseline_of("1.5B+7B", work.tree(16), 16)
        without, ahead = (
            figures.simulate_ours(case, figures.VARIANTS[name], work)
            for name in ("P+M", figures.FULL)
        )
        gains.append(ahead.goodput_tok_s / without.goodput_tok_s)
    assert gains[0] < 1.02
    assert gains[1] > 1.1


def test_both_sides_count_goodput_alike():
    """Without a straggler's slack and with one round, tokens and seconds are nearly the same."""
    work = Workload(generate_tokens=64, step_tokens=64, step_sigma=0.0)
    case = baseline_of("1.5B+1.5B", work.tree(8), 8)
    found = figures.simulate_ours(case, figures.VARIANTS["strong"], work)
    base = simulate_baseline(case)
    assert found is not None
    assert found.goodput_tok_s == pytest.approx(base.goodput_tok_s, rel=0.05)


def test_tables_say_ratios_of_what_ran(runs):
    rows = [{"pair": "1.5B+1.5B", "n": 16, "runs": figures.mean_runs([runs])}]
    (latency,) = figures.latency_rows(rows)
    ratio = runs[figures.FULL].goodput / runs["baseline"].goodput
    shown = figures.ratios(runs, (figures.FULL, "one that does not fit"))
    assert float(shown[f"{figures.FULL} / baseline"]) == pytest.approx(ratio, rel=0.01)
    assert latency["latency"].startswith("-")
    first = figures.summary(rows)[0]
    assert first["mean"] == first["least"] == first["most"] == shown[f"{figures.FULL} / baseline"]


def test_every_method_has_a_row_with_what_it_gains():
    rows = figures.method_rows(WORK, [4])
    assert [row["search"] for row in rows] == list(figures.METHODS)
    for row in rows:
        assert float(row[f"{figures.FULL} / baseline"]) > 1


def test_the_cost_model_alone_has_the_paper_s_asymmetry():
    for row in figures.throughput_rows():
        assert float(row["prefill, GiB at 80 %"]) < 1 < float(row["decode, GiB at 80 %"])
    gains = [float(row["throughput over half and half"]) for row in figures.split_rows()]
    assert gains == sorted(gains, reverse=True)


def test_three_pairs_on_a_card_of_24_gb():
    rows = list(plan_rows([512], find_profile("rtx-4090")))
    assert {row["pair"] for row in rows} == set(PAIRS)
    said = [row for row in rows if row["requests"] == "the weights do not fit"]
    assert [(row["pair"], row["memory"]) for row in said] == [
        ("1.5B+7B", "40%"),
        ("7B+1.5B", "40%"),
    ]
    whole = [row for row in rows if row["requests"] == "whole paths"]
    assert all(float(row["generator's share"]) > 0.7 for row in whole)
    assert all(float(row["search, s"]) < float(row["half and half, s"]) for row in whole)

import json
from itertools import combinations

import numpy as np
import pytest

from beamwright.evaluate.metrics import (
    Record,
    estimate_mean,
    estimate_share,
    pass_at_k,
    summarise,
    wilson_interval,
)


def record(index, correct, **changes):
    given = {"gold": "1", "level": None, "correct": correct, **changes}
    return Record(unique_id=str(index), index=index, problem="p", **given)


def test_what_does_not_apply_is_null():
    summary = summarise([record(0, None)])
    for name in ("accuracy", "accuracy_interval", "mean_rounds", "goodput_tok_s"):
        assert summary[name] is None
    assert summary["by_choice"] == {"best": None, "majority": None, "weighted": None}
    assert estimate_mean([]) is estimate_share([]) is None


def test_levels_in_numeric_order():
    levels = [10, 9, "10", None, "hard"]
    records = [record(i, i == 0, level=level) for i, level in enumerate(levels)]
    by_level = summarise(records)["by_level"]
    assert list(by_level) == ["9", "10", "hard"]
    interval = wilson_interval(0.5, 2)
    assert by_level["10"] == {"problems": 2, "correct": 1, "accuracy": 0.5, "interval": interval}


def test_every_vote_with_its_interval_where_errors_are_wrong_whoever_chooses():
    choices = {
        how: {"answer": "1", "correct": how != "best"} for how in ("best", "majority", "weighted")
    }
    summary = summarise([record(0, False, choices=choices), record(1, False, error="too long")])
    assert summary["errors"] == 1
    assert summary["by_choice"] == {"best": 0.0, "majority": 0.5, "weighted": 0.5}
    assert summary["top1"]["majority"] == {"value": 0.5, "interval": wilson_interval(0.5, 2)}


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [  # Brown, Cai and DasGupta's formula, worked by hand to four places
        (50, 100, 0.4038, 0.5962),
        (1, 1, 0.2065, 1.0),
        (0, 1, 0.0, 0.7935),
        (7, 7, 0.6457, 1.0),
        (0, 20, 0.0, 0.1611),
        (1, 20, 0.0089, 0.2361),
    ],
)
def test_wilson_interval(right, total, low, high):
    assert wilson_interval(right / total, total) == pytest.approx([low, high], abs=5e-5)


# --- pass@k ----------------------------------------------------------------------------------


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(right, k):
    subsets = list(combinations([True] * right + [False] * (5 - right), k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(5, right, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_exact_at_large_n():
    assert (pass_at_k(512, 1, 256), pass_at_k(512, 0, 512), pass_at_k(512, 512, 1)) == (0.5, 0, 1)


def test_pass_at_every_power_of_two_and_n():
    passed = summarise([record(0, True, num_correct=3, candidates=[{}] * 6)])["pass_at"]
    assert list(passed) == ["1", "2", "4", "6"]
    assert (passed["1"]["value"], passed["4"]["value"]) == (0.5, 1.0)


def test_accuracy_is_over_judged_problems_and_missing_candidates_are_wrong_ones():
    records = [
        record(0, True, num_correct=2, candidates=[{}] * 2),
        record(1, False, num_correct=0, error="too long"),
        record(2, None),
    ]
    summary = summarise(records, 4)
    assert (summary["problems"], summary["judged"], summary["correct"]) == (3, 2, 1)
    assert summary["accuracy"] == 0.5
    passed = summary["pass_at"]
    assert list(passed) == ["1", "2", "4"]
    assert [each["value"] for each in passed.values()] == [0.25, (5 / 6) / 2, 0.5]


def test_records_without_a_count_have_no_pass_at():
    assert summarise([record(0, True, candidates=[{}] * 2)])["pass_at"] == {"1": None, "2": None}
    assert summarise([])["pass_at"] == {}


# --- intervals -------------------------------------------------------------------------------


def test_the_interval_of_a_mean_is_about_two_standard_errors_and_repeats_itself():
    values = np.random.default_rng(1).normal(10, 2, 400)
    found = estimate_mean(values.tolist())
    assert found == estimate_mean(values.tolist())
    low, high = found["interval"]
    assert low == pytest.approx(values.mean() - 1.96 * 0.1, abs=0.05)
    assert high == pytest.approx(values.mean() + 1.96 * 0.1, abs=0.05)
    assert estimate_mean([3.0]) == {"value": 3.0, "interval": [3.0, 3.0]}


def test_goodput_counts_every_candidate_once():
    # 2 candidates of mean 100 tokens in 10 s and 1 of 50 tokens in 1 s: 250 tokens in 21 s.
    records = [
        record(0, True, mean_path_tokens=100, goodput_tok_s=10.0, candidates=[{}, {}]),
        record(1, True, mean_path_tokens=50, goodput_tok_s=50.0, candidates=[{}]),
        record(2, False, error="too long"),
    ]
    summary = summarise(records)
    assert summary["precise_goodput_tok_s"]["value"] == summary["goodput_tok_s"] == 250 / 21
    assert summary["precise_goodput_tok_s"]["interval"] == [10.0, 50.0]
    assert summary["completion_s"]["p50"]["value"] == 5.5


def test_figures_per_problem():
    records = []
    for i in range(1, 4):
        spent = {"tokens": {"generated": 10 * i}, "time": {"total_s": float(i)}}
        kv = {"device_peak_bytes": 100 * i, "host_peak_bytes": None}
        records.append(record(i, True, kv=kv, **spent))
    summary = summarise(records)
    values = {k: e and e["value"] for k, e in summary["per_problem"].items()}
    assert (values["tokens"], values["seconds"], values["kv_device_peak_bytes"]) == (20, 2.0, 200)
    assert values["kv_host_peak_bytes"] is values["h2d_bytes"] is None
    assert summary["latency_s"]["p50"]["value"] == 2.0
    assert summary["latency_s"]["p95"]["value"] == pytest.approx(2.9)
    json.dumps(summary, allow_nan=False)

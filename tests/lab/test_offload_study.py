"""Weights off the device: llama.cpp's rule, the predicted rows, and a small measurement."""

import pytest

from beamwright.plan.costs import Storage
from beamwright.plan.machines import find_profile
from beamwright.plan.workload import Workload
from beamwright.units import GIB
from beamwright_lab.offload import measured, predicted

CARD = find_profile("rtx-4060")
MODEL = predicted.sizes_of("qwen2.5-14b", Storage.INT4)


def rate(n, gib):
    return predicted.llama_rate(MODEL, Workload(n, 1, 128, 64, 32), CARD, gib * GIB)


def test_llama_cpp_copies_from_32_rows_on_and_computes_on_the_host_below():
    assert rate(4, 64) / rate(4, 7) > CARD.device_bandwidth / predicted.HOST_BANDWIDTH / 3
    assert rate(32, 64) > 2 * rate(32, 7)
    assert rate(32, 1) is None, "not even the output layer fits"


def test_predicted_rows_fit_their_limits():
    rows = [*predicted.rows_of_cases()]
    assert sum("tokens/s" in row for row in rows) > 0.9 * len(rows)
    for row in (row for row in rows if "tokens/s" in row):
        assert row["weights, GiB"] + row["KV, GiB"] < row["limit, GiB"], row
        assert 0 <= row["of the link"] <= 1 + 1e-9
    assert predicted.shown({"rows": rows}).count("\n") == len(rows) + 1


def test_a_small_model_is_measured_with_equal_trees():
    rows = measured.measure("tiny", 2, 1)
    assert [row["side"] for row in rows] == ["resident", "host, 500MB/s", "host, 4GB/s", "disk"]
    assert all(row["layers off"] >= 3 < row["MB a token"] * 1e6 for row in rows[1:])
    assert rows[1]["share of the floor"] == pytest.approx(1, abs=1), "timed by an emulated link"
    assert "share of the floor" in predicted.shown({"rows": rows})

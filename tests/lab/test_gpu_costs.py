"""The cost sheet: two numbers meet what a card measured, and the rest follows by counting."""

import pytest

pytest.importorskip("triton")

from beamwright.models.named import shape_from_text
from beamwright.plan.machines import CAPTURED_LAUNCH_S, CAPTURED_LAUNCHES, CARDS
from beamwright_lab.gpu import codes, costs


def test_two_numbers_meet_the_steps_that_a_card_measured():
    rows = costs.measured_steps()
    fit = costs.fitted(rows)
    errors = [abs(costs.error(fit, row)) for row in rows]
    assert len(errors) == 12
    assert sum(errors) / len(errors) <= 0.04
    assert sorted(errors)[-2] <= 0.06, "all but a small model's largest batch"
    assert 2e-6 < fit.launch_s < 5e-6
    assert abs(fit.share - costs.copied_share()) < 0.05, "weights are read as a copy reads"


def test_the_same_two_numbers_are_near_a_card_that_nothing_was_fitted_to():
    fit = costs.fitted(costs.measured_steps())
    errors = [abs(costs.error(fit, row, "h200")) for row in costs.measured_steps("h200")]
    assert len(errors) == 12
    assert sum(errors) / len(errors) <= 0.08


def test_what_is_counted_of_a_token():
    shape = shape_from_text("qwen2.5-1.5b")
    few, many = (costs.work_of(shape, paths, (10, 14)) for paths in (1, 64))
    assert few.launches == 294, "as the card's trace had them"
    assert few.flops == many.flops / 8, "one path is computed as eight rows"
    assert many.read_bytes - few.read_bytes == 63 * 96 * shape.kv_bytes_per_token(2)
    fit = costs.Fit(3e-6, 0.9)
    assert fit.seconds(few, CARDS["rtx-3060"]) > 2 * fit.seconds(few, CARDS["rtx-4090"])


def test_the_sheet_says_what_is_predicted_and_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(costs, "launches_of", lambda *_: (10, 14))
    monkeypatch.setattr(costs, "PATHS", (64,))
    found = costs.sheet()
    text = costs.block(found)
    assert text.startswith("**Predicted**")
    assert "| qwen2.5-7b | 64 | 294 | no fit | " in text
    measured = [row for row in found["rows"] if row.get("measured_ms")]
    assert {row["card"] for row in measured} == {"h100", "h200"}


def test_plans_and_simulations_take_what_was_fitted_and_counted():
    """To a tenth: the card was measured again since."""
    fit = costs.fitted(costs.measured_steps())
    assert fit.launch_s == pytest.approx(CAPTURED_LAUNCH_S, rel=0.1)
    assert costs.launches_of("qwen2.5-1.5b", 256, (9, 0))[0] == CAPTURED_LAUNCHES


def test_codes_are_fewer_bytes_and_a_launch_a_layer_more(monkeypatch):
    monkeypatch.setattr(codes, "launches", lambda _, storage: (10 - (storage == "plain"), 14))
    fit = costs.fitted(costs.measured_steps())
    plain, int8, int4 = (codes.predicted(fit, "qwen2.5-7b", each) for each in codes.STORAGES)
    assert int4["GB a token"] < 0.35 * plain["GB a token"] < 0.7 * int8["GB a token"]
    assert int4["h100, 1"] < int8["h100, 1"] < plain["h100, 1"]
    assert plain["rtx-3060, 1"] is None, "14 GB do not fit 12"

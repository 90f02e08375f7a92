"""The cost sheet: two numbers meet what a card measured; launches are counted without a card."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from beamwright.models.named import shape_from_text
from beamwright.plan.machines import CAPTURED_LAUNCH_S, CAPTURED_LAUNCHES, CARDS
from beamwright_lab.gpu import costs
from beamwright_lab.gpu.launches import DEVICE, captured_prefill, on_card, prefill_launches


def test_two_numbers_meet_the_steps_that_a_card_measured():
    rows = costs.measured_steps()
    fit = costs.fit_costs(rows)
    errors = [abs(costs.relative_error(fit, row)) for row in rows]
    assert len(errors) == 12
    assert sum(errors) / len(errors) <= 0.04
    assert sorted(errors)[-2] <= 0.06, "all but a small model's largest batch"
    assert 2e-6 < fit.launch_s < 5e-6
    assert abs(fit.share - costs.copied_share()) < 0.05, "weights are read as a copy reads"


def test_the_same_two_numbers_are_near_a_card_that_nothing_was_fitted_to():
    fit = costs.fit_costs(costs.measured_steps())
    errors = [abs(costs.relative_error(fit, row, "h200")) for row in costs.measured_steps("h200")]
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
    monkeypatch.setattr(costs, "count_launches", lambda *_: (10, 14))
    monkeypatch.setattr(costs, "PATHS", (64,))
    found = costs.sheet()
    text = costs.block(found)
    assert "predicted before it was measured" in " ".join(text.split())
    assert "| qwen2.5-7b | 64 | 294 | no fit | " in text
    measured = [row for row in found["rows"] if row.get("measured_ms")]
    assert {row["card"] for row in measured} == {"h100", "h200"}


def test_plans_and_simulations_take_what_was_fitted_and_counted():
    """To a tenth: the card was measured again since."""
    fit = costs.fit_costs(costs.measured_steps())
    assert fit.launch_s == pytest.approx(CAPTURED_LAUNCH_S, rel=0.1)
    assert costs.count_launches("qwen2.5-1.5b", 256, (9, 0))[0] == CAPTURED_LAUNCHES


# --- launches, on torch's `meta` device --------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen2.5-7b", "opt-6.7b"])
def test_a_captured_prefill_pass_is_a_replay_whatever_the_layers(name):
    """Token ids and lists go to the card, what is read is copied; nothing else asks the host."""
    shape = replace(shape_from_text(name), layers=2)
    beside, step = captured_prefill(shape, (200, 40))
    assert (beside.names, beside.copied) == (["copy_", "copy_", "clone"], 2)
    plain = prefill_launches(shape, (200, 40))
    assert step.copied == 0
    assert len(step.names) <= len(plain.names) + 1, "what was found is put where it is kept"


def test_reads_by_the_host_and_tensors_of_two_devices_are_errors():
    """Without which the counts above would prove less."""
    here, there = torch.ones(4), torch.ones(4, device=DEVICE)
    for read in (there.tolist, there[0].item, lambda: bool(there[0] > 0), there.nonzero):
        with on_card(), pytest.raises((RuntimeError, NotImplementedError)):
            read()
    for mix in (lambda: F.linear(there[None], here[None]), lambda: here + there):
        with on_card(), pytest.raises(RuntimeError, match=r"device|the card and on the host"):
            mix()
    with on_card() as noted:
        there.copy_(here)
    assert (noted.names, noted.copied) == (["copy_"], 1)

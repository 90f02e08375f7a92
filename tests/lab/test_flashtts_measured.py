"""The baseline's rules as options of this engine: measured searches have equal trees."""

from __future__ import annotations

import pytest

from beamwright.evaluate import load_problems
from beamwright_lab.flashtts.baseline import Rules
from beamwright_lab.flashtts.measured import AMPLE, ARMS, measure


def test_every_arm_writes_the_same_tree_in_ample_and_in_little_memory():
    problems = load_problems("bundled:dev", 1).problems
    ample, peak = measure(8, AMPLE, list(ARMS), problems, 1)
    tight, _ = measure(8, peak // 2, list(ARMS), problems, 1)
    assert {row["equal"] for row in ample + tight} == {"1 of 1"}
    assert len({row["generated"] for row in ample + tight}) == 1
    assert ample[0]["recomputed"] == 0 < tight[0]["recomputed"]
    assert all(row["goodput, tok/s"] > 0 for row in ample + tight)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("split", Rules().generator_share),
        ("max_batch", Rules().max_running),
        ("order", "random"),
        ("evict", "recompute"),
        ("speculation", "off"),
    ],
)
def test_the_baseline_has_the_frozen_rules(option, value):
    assert ARMS["baseline"][option] == value

import pytest

from beamwright.checks.model import measure_score_drift
from beamwright.errors import InputError
from beamwright.sections import ModelSettings

SAMPLES = [
    ("Ann has 12 apples and eats 3. How many are left?", "12-3=9.\n\nThe answer is \\boxed{9}."),
    ("Bob has 2 pears. How many pears does Bob have?", "The answer is \\boxed{2}."),
]


def test_scores_of_the_bundled_verifier_move_and_further_with_fewer_bits():
    int8, int4 = (
        measure_score_drift(ModelSettings(verifier_weights=weights), SAMPLES)
        for weights in ("int8", "int4")
    )
    for report in (int8, int4):
        assert report["steps"] == 3
        assert 0 < report["mean_abs_score_diff"] <= report["max_abs_score_diff"] < 1
    assert int8["max_abs_score_diff"] < 0.2
    assert int8["mean_abs_score_diff"] < int4["mean_abs_score_diff"]


def test_the_same_weights_give_the_same_scores():
    report = measure_score_drift(ModelSettings(), SAMPLES)
    assert (report["max_abs_score_diff"], report["mean_abs_score_diff"]) == (0, 0)


def test_a_scorer_without_weights_cannot_drift():
    settings = ModelSettings(verifier="logprob", verifier_weights="int8")
    with pytest.raises(InputError, match="--verifier logprob has no weights"):
        measure_score_drift(settings, SAMPLES)

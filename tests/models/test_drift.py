import pytest
import torch

from beamwright.checks.model import compare_logits, measure_drift
from beamwright.sections import ModelSettings

SAMPLES = [("Ann has 12 apples.", "She eats 3.\n\nThe answer is 9."), ("1+1?", "2")]


def test_the_figures_of_two_sets_of_logits():
    expected = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    found = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    report = compare_logits(expected, found)
    assert (report["tokens"], report["top1_agreement"]) == (2, 0.5)
    assert (report["max_abs_logit_diff"], report["mean_abs_logit_diff"]) == (2.0, 0.75)
    p, q = (torch.softmax(row, 0) for row in (expected[1], found[1]))
    assert report["mean_kl_nats"] == pytest.approx(float((p * (p / q).log()).sum()) / 2)


def test_int4_drifts_further_than_int8_and_nothing_does_not_drift(write_family):
    folder, _ = write_family("llama-odd")

    def drift(weights):
        return measure_drift(ModelSettings(model=str(folder), weights=weights), SAMPLES)

    none, int8, int4 = (drift(weights) for weights in ("auto", "int8", "int4"))
    assert (none["max_abs_logit_diff"], none["mean_kl_nats"], none["top1_agreement"]) == (0, 0, 1)
    for name in ("max_abs_logit_diff", "mean_abs_logit_diff", "mean_kl_nats"):
        assert 0 < int8[name] < int4[name]
    assert none["tokens"] == int8["tokens"] > 25  # letters, nearly


def test_a_model_without_a_tokenizer_gets_random_tokens():
    spec = "random:opt,layers=1,hidden=32,heads=2,intermediate=128,vocab=50,context=40"
    report = measure_drift(ModelSettings(model=spec, weights="int8"), SAMPLES)
    assert report["tokens"] == 2 * 40
    assert report["max_abs_logit_diff"] > 0

"""AsyncSpade's predictor against loops that say the same slowly."""

import pytest
import torch

from beamwright.errors import InputError
from beamwright.sparse.predict import RIDGE, predict_query, weigh
from beamwright.sparse.rule import METHODS, parse_method
from beamwright_lab.baselines import weigh_as_printed, weigh_by_ridge

READINGS = pytest.mark.parametrize("reading", [weigh, weigh_as_printed, weigh_by_ridge])


def windows(width=6, dim=8, seed=0):
    """Queries [2, 3, width + 1, dim] that move on slowly."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(2, 3, width + 1, dim, generator=generator)
    return steps.cumsum(-2) / 3


def scale_of(queries):
    """The mean squared norm of the window's queries."""
    return sum(float(query @ query) for query in queries[:-1]) / (len(queries) - 1)


def by_the_equations(queries, reading):
    """Eq. 2 to 5 for one head, one k after the other."""
    count, scale = len(queries) - 1, scale_of(queries)
    candidates = []
    for k in range(1, count + 1):
        past = queries[-1 - k : -1]
        gram = past @ past.T + RIDGE * scale * torch.eye(k)
        weights = torch.linalg.solve(gram, past @ queries[-1])
        if reading is weigh:
            weights = torch.softmax(weights, -1)
        candidates.append(weights @ queries[-k:])
    return torch.stack(candidates).mean(0)


@pytest.mark.parametrize("reading", [weigh, weigh_by_ridge])
def test_asyncspade_is_its_equations(reading):
    queries = windows()
    found = predict_query(queries, reading)
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        one = queries[tuple(index)]
        torch.testing.assert_close(found[tuple(index)], by_the_equations(one, reading))


def eq_2(queries, weights):
    """What the paper's Eq. 2 minimises, over the mean squared norm: the error and the ridge."""
    k = len(weights)
    past = queries[-1 - k : -1].flip(0)
    logits = weights.log() - weights.log().mean()  # the smallest that have this softmax
    error = (weights @ past - queries[-1]).square().sum() / scale_of(queries)
    return float(error + RIDGE * logits.square().sum())


def test_as_printed_eq_2_is_minimised():
    """Nothing near is smaller, and what the text says is larger."""
    generator = torch.Generator().manual_seed(1)
    for queries in windows().flatten(0, 1):
        printed, text = (by(queries[None])[0] for by in (weigh_as_printed, weigh))
        for k in range(2, len(queries)):
            found = printed[k - 1, :k]
            assert found.sum() == pytest.approx(1)
            least = eq_2(queries, found)
            assert least <= eq_2(queries, text[k - 1, :k]) + 1e-3
            for _ in range(20):
                step = 0.1 * torch.randn(k, generator=generator)
                other = torch.softmax(found.log() + step, -1)
                assert least <= eq_2(queries, other) + 1e-3


@READINGS
def test_a_row_is_predicted_alike_whoever_is_beside_it(reading):
    for width in (3, 16):
        queries = windows(width).repeat(5, 1, 1, 1)
        alone = torch.cat([predict_query(row[None], reading) for row in queries])
        assert torch.equal(predict_query(queries, reading), alone)


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@READINGS
def test_queries_that_stand_still_stay(reading, count, dtype):
    queries = windows()[..., -1:, :].expand(2, 3, count, 8).to(dtype)
    found = predict_query(queries, reading)
    assert found.dtype == dtype
    torch.testing.assert_close(found, queries[..., -1, :], rtol=2e-2, atol=2e-2)


@READINGS
def test_zeros_are_no_singular_system(reading):
    assert predict_query(torch.zeros(1, 5, 4), reading).isfinite().all()


def test_readings_of_the_lab_are_refused_by_name_where_it_is_not(monkeypatch):
    parse_method.cache_clear()
    monkeypatch.delitem(METHODS, "asyncspade-ridge")
    with pytest.raises(InputError, match=r"^--sparse asyncspade-ridge: needs the lab. Run pip"):
        parse_method("asyncspade-ridge,pack=2")

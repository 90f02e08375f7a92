"""Predictors against loops that say the same slowly."""

import pytest
import torch

from beamwright.sparse.rule import PREDICTORS, RIDGE, algorithm_one, asyncspade, harmonic, last


def windows(width=6, dim=8, seed=0):
    """Queries [2, 3, width + 1, dim] that move on slowly."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(2, 3, width + 1, dim, generator=generator)
    return steps.cumsum(-2) / 3


def by_the_equations(queries):
    """Eq. 2 to 5 for one head, one k after the other."""
    count = len(queries) - 1
    scale = sum(float(query @ query) for query in queries[:-1]) / count
    candidates = []
    for k in range(1, count + 1):
        past = queries[-1 - k : -1]
        gram = past @ past.T + RIDGE * scale * torch.eye(k)
        weights = torch.softmax(torch.linalg.solve(gram, past @ queries[-1]), -1)
        candidates.append(weights @ queries[-k:])
    return torch.stack(candidates).mean(0)


def test_asyncspade_is_its_equations():
    queries = windows()
    found = asyncspade(queries)
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        one = queries[tuple(index)]
        torch.testing.assert_close(found[tuple(index)], by_the_equations(one))


def test_algorithm_one_never_sees_the_newest_query_but_in_its_weights():
    """Line 23 leaves it out; as a target it changes weights only."""
    queries = windows()
    queries[..., 0] = 0
    queries[..., -1, 0] = 5
    assert (algorithm_one(queries)[..., 0] == 0).all()
    assert (asyncspade(queries)[..., 0] > 0).all()


def literal(cache, epsilon):
    """Algorithm 1 for one head, as printed."""
    width = len(cache)
    hist, prev = cache[: width - 1], cache[-1:]
    base = torch.softmax(
        -(torch.linalg.inv(hist @ hist.T + epsilon * torch.eye(width - 1)) @ (hist @ prev.T)), 0
    )
    matrix = torch.zeros(width, width - 1)
    for row in range(width):
        for column in range(width - 1):
            matrix[row, column] = base[column, 0] if column <= row else 0.0
    matrix = torch.softmax(matrix, -1)
    candidates = []
    for j in range(1, width + 1):
        chosen = cache[-1 - j : -1] if j < width else cache[:-1]
        weights = matrix[j - 1, :j]
        candidates.append(sum(weights[k] * chosen[k] for k in range(len(chosen))))
    return torch.stack(candidates).mean(0)


def test_algorithm_one_is_what_is_printed():
    queries = windows()
    one = queries[0, 0]
    epsilon = RIDGE * float((one[:-1] ** 2).sum(-1).mean())
    torch.testing.assert_close(algorithm_one(queries)[0, 0], literal(one, epsilon))


def test_harmonic_is_the_mean_of_means():
    queries = windows(width=4)
    means = [queries[..., -k:, :].mean(-2) for k in range(1, 5)]
    torch.testing.assert_close(harmonic(queries), torch.stack(means).mean(0))


def test_uniform_weights_make_asyncspade_harmonic():
    """Orthogonal queries of one length tell the regression nothing."""
    queries = torch.eye(7)[None] * 3
    torch.testing.assert_close(asyncspade(queries), harmonic(queries))


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_young_row_has_its_last_query(name):
    queries = windows()[..., -1:, :]
    torch.testing.assert_close(PREDICTORS[name](queries), last(queries))


@pytest.mark.parametrize("name", PREDICTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_stand_still_stay(name, dtype):
    """Every predictor is a mean of the window; Algorithm 1's weights do not add up to one."""
    queries = windows()[..., -1:, :].expand(2, 3, 7, 8).to(dtype)
    found = PREDICTORS[name](queries)
    assert found.dtype == dtype
    assert found.isfinite().all()
    if name != "algorithm-1":
        torch.testing.assert_close(found, queries[..., -1, :], rtol=2e-2, atol=2e-2)


def test_zeros_are_no_singular_system():
    assert asyncspade(torch.zeros(1, 5, 4)).isfinite().all()

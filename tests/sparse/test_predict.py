"""AsyncSpade's predictor against loops that say the same slowly."""

import pytest
import torch

from beamwright.sparse.rule import RIDGE, asyncspade


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


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_stand_still_stay(count, dtype):
    queries = windows()[..., -1:, :].expand(2, 3, count, 8).to(dtype)
    found = asyncspade(queries)
    assert found.dtype == dtype
    torch.testing.assert_close(found, queries[..., -1, :], rtol=2e-2, atol=2e-2)


def test_zeros_are_no_singular_system():
    assert asyncspade(torch.zeros(1, 5, 4)).isfinite().all()

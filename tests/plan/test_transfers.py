import pytest

from beamwright.plan.workload import dm_lower_bound_bytes


@pytest.mark.parametrize(
    ("needed", "budget", "expected"),
    [([], 10, 0), ([10, 3], 10, 0), ([11, 9, 30], 10, 21), ([5, 5], 0, 10)],
)
def test_what_does_not_fit_must_cross_the_link_every_round(needed, budget, expected):
    assert dm_lower_bound_bytes(needed, budget) == expected

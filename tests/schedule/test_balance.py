import pytest

from beamwright.schedule.algorithm_one import balanced_sizes, packed_sizes


@pytest.mark.parametrize(
    ("num_beams", "capacity", "balanced", "packed"),
    [
        (16, 7, [5, 5, 6], [7, 7, 2]),  # the paper's example, section 4.2
        (14, 6, [4, 5, 5], [6, 6, 2]),  # the slides' example
        (6, 3, [3, 3], [3, 3]),
        (5, 9, [5], [5]),
        (3, 1, [1, 1, 1], [1, 1, 1]),
        (0, 4, [], []),
    ],
)
def test_sizes(num_beams, capacity, balanced, packed):
    assert balanced_sizes(num_beams, capacity) == balanced
    assert packed_sizes(num_beams, capacity) == packed


def test_balanced_sizes_are_fewest_even_and_ascending():
    for num_beams in range(1, 40):
        for capacity in range(1, 20):
            sizes = balanced_sizes(num_beams, capacity)
            assert sum(sizes) == num_beams
            assert len(sizes) == -(-num_beams // capacity)
            assert sizes == sorted(sizes)
            assert max(sizes) - min(sizes) <= 1

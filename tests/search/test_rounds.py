"""Sharing out children."""

import random

import pytest

from beamwright.search.rounds import largest_remainder, systematic_resample


def test_shares_are_within_one_of_the_exact_ones():
    for seed in range(20):
        rng = random.Random(seed)
        weights = [rng.random() for _ in range(rng.randint(1, 12))]
        total = rng.randint(1, 40)
        drawn = systematic_resample(weights, total, rng.random())
        for shares in (largest_remainder(weights, total), drawn):
            assert sum(shares) == total
            for share, weight in zip(shares, weights, strict=True):
                assert abs(share - total * weight / sum(weights)) < 1 + 1e-9


def test_systematic_resampling_is_unbiased():
    weights, total, draws = [0.1, 0.25, 0.65], 4, 2000
    sums = [0, 0, 0]
    for draw in range(draws):
        for i, share in enumerate(systematic_resample(weights, total, (draw + 0.5) / draws)):
            sums[i] += share
    assert [each / draws for each in sums] == pytest.approx([0.4, 1.0, 2.6], abs=1e-3)

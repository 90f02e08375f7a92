"""Ranking, duplicates, and sharing out children."""

import random

import pytest

from beamwright.search.rounds import (
    largest_remainder,
    ranked,
    systematic,
    weights_of,
)
from fakes import grow, new_tree


def candidates(scores, texts=None):
    tree = new_tree()
    nodes = grow(tree, tree.root, texts or ["a"] * len(scores))
    for node, score in zip(nodes, scores, strict=True):
        node.score = score
    return nodes


def ordinals(nodes):
    return [node.lineage[-1] for node in nodes]


@pytest.mark.parametrize(
    ("scores", "order"),
    [
        ([0.2, 0.9, 0.5, 0.7], [1, 3, 2, 0]),
        ([0.5, 0.5 + 2e-7, 0.5 - 2e-7, 0.5 + 1e-5], [3, 0, 1, 2]),  # ties go by lineage,
        ([0.5] * 12, [*range(12)]),  # as numbers
        ([None, -5.0, None], [1, 0, 2]),
    ],
)
def test_best_first_whatever_the_order_given(scores, order):
    nodes = candidates(scores)
    assert ordinals(ranked(nodes)) == ordinals(ranked(nodes[::-1])) == order


def test_shares_are_within_one_of_the_exact_ones():
    for seed in range(20):
        rng = random.Random(seed)
        weights = [rng.random() for _ in range(rng.randint(1, 12))]
        total = rng.randint(1, 40)
        for shares in (
            largest_remainder(weights, total),
            systematic(weights, total, rng.random()),
        ):
            assert sum(shares) == total
            for share, weight in zip(shares, weights, strict=True):
                assert abs(share - total * weight / sum(weights)) < 1 + 1e-9


def test_systematic_resampling_is_unbiased():
    weights, total, draws = [0.1, 0.25, 0.65], 4, 2000
    sums = [0, 0, 0]
    for draw in range(draws):
        for i, share in enumerate(systematic(weights, total, (draw + 0.5) / draws)):
            sums[i] += share
    assert [each / draws for each in sums] == pytest.approx([0.4, 1.0, 2.6], abs=1e-3)


def test_weights():
    soft = weights_of([1.0, 0.0], "softmax", 0.5)
    assert soft[0] / soft[1] == pytest.approx(2.718281828**2)
    assert weights_of([0.2, 0.6], "linear", 1.0) == [0.2, 0.6]
    assert weights_of([-1.0, None], "linear", 1.0) == [1.0, 0.0], "log-probabilities weigh exp"
    assert weights_of([None, float("nan")], "softmax", 1.0) == [1.0, 1.0]
    assert weights_of([0.0, 0.0], "linear", 1.0) == [1.0, 1.0]

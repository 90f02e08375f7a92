import math

import pytest

from beamwright.verify import LogprobVerifier, aggregate
from beamwright.verify.confidence import NoVerifier
from fakes import add_step, new_tree


@pytest.mark.parametrize(
    ("how", "expected"), [("last", 0.4), ("min", 0.2), ("prod", 0.04), ("mean", 1.1 / 3)]
)
def test_aggregates(how, expected):
    assert aggregate([0.5, 0.2, 0.4], how) == pytest.approx(expected)


@pytest.mark.parametrize("how", ["last", "min", "prod", "mean"])
def test_steps_without_a_score_are_left_out(how):
    assert aggregate([0.5, None, 0.2, None], how) == aggregate([0.5, 0.2], how)
    assert aggregate([None, None], how) is None
    assert aggregate([], how) is None


def test_logprob_is_the_geometric_mean_of_the_steps_probabilities():
    tree = new_tree()
    node = tree.expand(tree.root, 1)[0]
    add_step(tree, node, "ab", tokens=(1, 2))
    node.logprobs = (math.log(0.9), math.log(0.4))
    assert LogprobVerifier().score([node]) == pytest.approx([0.6])
    node.logprobs = ()
    assert LogprobVerifier().score([node]) == [None]


def test_no_verifier_has_no_opinion():
    tree = new_tree()
    assert NoVerifier().score(tree.expand(tree.root, 3)) == [None] * 3

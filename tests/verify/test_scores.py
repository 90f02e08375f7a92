import math

import pytest

from beamwright.config import ModelSettings
from beamwright.errors import InputError
from beamwright.verify import (
    DeepConfVerifier,
    LogprobVerifier,
    MinLogprobVerifier,
    NoVerifier,
    aggregate,
    resolve_verifier,
)
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


def path_of(*steps):
    """A path whose steps have these probabilities; returns its nodes."""
    tree = new_tree()
    nodes = [tree.root]
    for probabilities in steps:
        (node,) = tree.expand(nodes[-1], 1)
        add_step(tree, node, "x", tokens=(7,) * len(probabilities))
        node.logprobs = tuple(map(math.log, probabilities))
        tree.keep(node)
        nodes.append(node)
    return nodes[1:]


def test_min_logprob_is_the_least_likely_token():
    first, second = path_of((0.9, 0.4, 0.8), ())
    assert MinLogprobVerifier().score([first, second]) == [pytest.approx(0.4), None]
    assert MinLogprobVerifier.default_aggregate == "min"


def test_deepconf_is_the_lowest_window_of_the_path_so_far():
    nodes = path_of((0.5, 0.25), (1.0, 1.0), (0.0625, 1.0), ())
    scores = DeepConfVerifier(window=2).score(nodes)
    # Windows may span two steps: (0.25, 1.0) is no lower than (0.5, 0.25), (1.0, 0.0625) is.
    assert scores[:3] == pytest.approx([0.125**0.5, 0.125**0.5, 0.25])
    assert scores[3] is None
    assert DeepConfVerifier.default_aggregate == "last"


def test_deepconf_takes_a_path_shorter_than_its_window_whole():
    nodes = path_of((0.5,), (0.125,), (1.0, 1.0))
    assert DeepConfVerifier(window=3).score(nodes) == pytest.approx([0.5, 0.25, 0.0625 ** (1 / 3)])
    assert DeepConfVerifier(window=1).score(path_of((1.0, 1.0))) == [1.0]


@pytest.mark.parametrize(
    ("option", "kind"),
    [("logprob", LogprobVerifier), ("min-logprob", MinLogprobVerifier), ("none", NoVerifier)],
)
def test_a_scorer_is_named(option, kind):
    assert type(resolve_verifier(ModelSettings(verifier=option)).without_model) is kind
    with pytest.raises(InputError, match="takes no option"):
        resolve_verifier(ModelSettings(verifier=f"{option}:3"))


def test_deepconfs_window_is_named():
    found = [resolve_verifier(ModelSettings(verifier=f"deepconf{w}")) for w in ("", ":16")]
    assert [source.without_model.window for source in found] == [128, 16]


@pytest.mark.parametrize("window", ["0", "-1", "wide", ""])
def test_a_window_is_a_positive_number(window):
    with pytest.raises(InputError, match="the window is a positive number of tokens"):
        resolve_verifier(ModelSettings(verifier=f"deepconf:{window}"))

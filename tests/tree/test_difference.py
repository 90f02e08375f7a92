"""Where two trees part, and what digests of rounds see."""

import pytest

from beamwright.tree import (
    StopReason,
    TreeDifference,
    find_first_difference,
    first_differing_round,
    round_digests,
)
from fakes import new_tree


def build(second=(5, 6), stop=StopReason.DELIMITER, keep=0, state="prune"):
    """Two steps, then two below one of them."""
    tree = new_tree(num_prompt_tokens=3)
    nodes = tree.expand(tree.root, 2)
    for node in nodes:
        tree.commit(node, (7, 8), (0.0, 0.0), StopReason.DELIMITER, "a")
    tree.keep(nodes[keep])
    getattr(tree, state)(nodes[1 - keep])
    tree.rounds = 1
    for node in tree.expand(nodes[keep], 2):
        tree.commit(node, second, (0.0,) * len(second), stop, "ab")
    tree.rounds = 2
    return tree


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"state": "keep"}, None),
        ({"second": (5, 9)}, TreeDifference("tokens", 2, (0, 0), 6, 6, 9)),
        ({"second": (5,)}, TreeDifference("tokens", 2, (0, 0), 6, 6, None)),
        ({"second": (5, 6, 7)}, TreeDifference("tokens", 2, (0, 0), 7, None, 7)),
        ({"stop": StopReason.EOS}, TreeDifference("stop", 2, (0, 0))),
        ({"keep": 1}, TreeDifference("steps", 2, (0, 0))),
    ],
)
def test_the_first_difference(changes, expected):
    was, now = build(), build(**changes)
    assert find_first_difference(was, now) == expected
    other = first_differing_round(round_digests(was), round_digests(now))
    assert other == (None if expected is None else expected.round)


def test_open_steps_are_not_written_yet():
    was, now = build(), build()
    now.keep(now.candidates()[0])
    now.expand(now.root.children[0].children[0], 3)
    assert find_first_difference(was, now) is None
    assert round_digests(was) == round_digests(now)


def test_a_tree_without_steps():
    assert round_digests(new_tree()) == []


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [("ab", "ab", None), ("ab", "xb", 1), ("ab", "ax", 2), ("ab", "abc", 3), ("ab", "a", 2)],
)
def test_the_first_other_round(was, now, expected):
    assert first_differing_round(was, now) == expected

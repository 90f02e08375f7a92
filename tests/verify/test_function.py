"""A verifier that is a Python function."""

import pytest

from beamwright.errors import InputError
from beamwright.verify.scorers import CallableVerifier
from fakes import grow, new_tree


def two_steps(*texts):
    tree = new_tree(problem_id=7, text="1+1?")
    node = tree.root
    for text in texts:
        (node,) = grow(tree, node, [text])
        tree.keep(node)
    return node


def raises(problem, steps):
    raise ValueError("no\nlicence")


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (raises, "verifier raises on problem 7, step 2: it raised ValueError: no licence"),
        (lambda p, s: "good", "it returned str, not a number"),
        (lambda p, s: float("nan"), "it returned nan, not a finite number"),
        (lambda p, s: 10**400, "it returned int, not a number of a float"),
        (lambda p: 1.0, "it raised TypeError"),
    ],
)
def test_what_a_function_may_do_wrong_is_one_line(function, complaint):
    with pytest.raises(InputError, match=complaint) as caught:
        CallableVerifier(function).score([two_steps("a", "b")])
    assert "\n" not in str(caught.value)

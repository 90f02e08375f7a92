"""The bundled models grow the same trees on every CPU: pinned, in float64.

float32 is promised on one machine only: another CPU's rounding may flip a token.
"""

import json

import pytest

import bundled_trees


@pytest.mark.parametrize("name", bundled_trees.SEARCHES)
def test_the_trees_are_the_pinned_ones(name):
    pinned = json.loads(bundled_trees.FILE.read_text(encoding="utf-8"))[name]
    found = bundled_trees.grow_trees(bundled_trees.SEARCHES[name])
    assert found == pinned, "if that is meant, run: python tests/bundled_trees.py"


def test_every_search_is_pinned():
    pinned = json.loads(bundled_trees.FILE.read_text(encoding="utf-8"))
    assert set(pinned) == set(bundled_trees.SEARCHES)

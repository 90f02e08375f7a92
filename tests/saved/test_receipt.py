"""Receipts as JSON: what is asked comes back, and what is none is one line."""

import json

import pytest

from beamwright.errors import InputError
from beamwright.saved.receipt import FORMAT, problem_from_json, problem_to_json, read_receipt
from beamwright.tree import Conversation, RawPrompt
from tables import beside

CASES = beside(__file__)
WHOLE = {**CASES["whole"], "format": FORMAT, "tree_hash": "0" * 64}


@pytest.mark.parametrize(
    "problem",
    [
        "1+1?",
        Conversation(({"role": "user", "content": "1+1?"},), ({"type": "function"},)),
        Conversation(({"role": "user", "content": "?"},), template_args={"think": [False, {}]}),
        RawPrompt("1+1="),
        RawPrompt((1, 2, 3)),
        64,
    ],
)
def test_a_problem_comes_back(problem):
    assert problem_from_json(json.loads(json.dumps(problem_to_json(problem))), "f") == problem


@pytest.mark.parametrize("asked", CASES["no_problems"])
def test_a_problem_that_is_none(asked):
    with pytest.raises(InputError, match=r"^f: not a receipt"):
        problem_from_json(asked, "f")


def test_a_receipt_is_read():
    assert read_receipt(WHOLE, "f").settings == {"n": 4}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        *((content, "Receipt") for content in (None, [])),
        ({}, "format"),
        *(({**WHOLE, name: odd}, name) for name, odd in CASES["odd"].items()),
    ],
)
def test_what_is_none_is_one_line(content, named):
    with pytest.raises(InputError, match=r"^f: not a receipt") as caught:
        read_receipt(content, "f")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)

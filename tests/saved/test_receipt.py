"""Receipts as JSON: what is asked comes back, and what is none is one line."""

import json

import pytest

from beamwright.errors import InputError
from beamwright.saved.receipt import FORMAT, asked_as, problem_of, read_receipt
from beamwright.tree import Conversation, RawPrompt

WHOLE = {
    **{"format": FORMAT, "tree_hash": "0" * 64, "rounds": ["01234567"], "problem_id": 0},
    **{"problem": "1+1?", "prompt": "ab", "settings": {"n": 4}, "exact": True},
    **{"recomputed": False, "unrepeatable": None, "generator": None, "verifier": None},
    **{"machine": {"device": "cpu", "attention": None}, "versions": {"torch": "2.13.0"}},
}


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
    assert problem_of(json.loads(json.dumps(asked_as(problem))), "f") == problem


@pytest.mark.parametrize(
    "asked",
    [
        *(None, 3, [], {}, {"prompt": [1.5]}, {"prompt_tokens": 0}, {"messages": [1], "tools": []}),
        *({"messages": [], "tools": [], "template_args": a} for a in (3, None, {"tokenize": 1})),
    ],
)
def test_a_problem_that_is_none(asked):
    with pytest.raises(InputError, match=r"^f: not a receipt"):
        problem_of(asked, "f")


def test_a_receipt_is_read():
    assert read_receipt(WHOLE, "f").settings == {"n": 4}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "Receipt"),
        ([], "Receipt"),
        ({}, "format"),
        ({**WHOLE, "format": "beamwright receipt 2"}, "format"),
        ({**WHOLE, "tree_hash": "ab"}, "tree_hash"),
        ({**WHOLE, "rounds": [1]}, "rounds"),
        ({**WHOLE, "settings": []}, "settings"),
        ({**WHOLE, "exact": 1}, "exact"),
        ({**WHOLE, "more": 1}, "more"),
    ],
)
def test_what_is_none_is_one_line(content, named):
    with pytest.raises(InputError, match=r"^f: not a receipt") as caught:
        read_receipt(content, "f")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)

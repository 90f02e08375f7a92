"""What of a reply a verifier is shown: its answer, its thought, or both; functions that fail."""

from __future__ import annotations

import pytest

from beamwright.errors import InputError
from beamwright.models.hub import BUNDLED
from beamwright.models.tokenizer import TextCodec
from beamwright.verify.family import family
from beamwright.verify.path_encoder import PathEncoder
from beamwright.verify.scorers import CallableVerifier, ObjectVerifier, make_scorer
from beamwright.verify.spec import VerifierSpec
from fakes import grow, new_tree


def path_of(tree, *steps):
    """Kept steps one below another: (text, is a thought)."""
    nodes = [tree.root]
    for text, thought in steps:
        (node,) = grow(tree, nodes[-1], [text])
        node.thought = thought
        tree.keep(node)
        nodes.append(node)
    return nodes[1:]


@pytest.fixture
def path():
    """Steps of a thought, a blank one, and two of the answer."""
    thoughts = [("Is it 4?\n\n", True), ("No.", True)]
    return path_of(new_tree(), *thoughts, ("\n\n", False), ("It is 3.\n\n", False), ("3.", False))


@pytest.mark.parametrize(
    ("sees", "shown"),
    [
        ("answer", ["It is 3.\n\n", "3."]),
        ("thought", ["Is it 4?\n\n", "No."]),
        ("both", ["Is it 4?\n\n", "No.", "It is 3.\n\n", "3."]),
    ],
)
def test_a_function_gets_the_steps_that_it_sees(path, sees, shown):
    def function(problem, steps):
        heard.append(steps)
        return 1.0

    heard = []
    function.sees = sees
    verifier = CallableVerifier(function)
    last = next(node for node in reversed(path) if node.is_seen_by(sees))
    assert verifier.traits.sees == sees
    assert verifier.score([last]) == [1.0]
    assert heard == [shown]


def test_who_says_nothing_sees_answers_and_what_was_drawn_is_seen_whole():
    assert CallableVerifier(lambda problem, steps: 1.0).traits.sees == "answer"
    assert (
        make_scorer("logprob", None).traits.sees
        == make_scorer("deepconf", None).traits.sees
        == "both"
    )
    assert make_scorer("none", None).traits.sees == "answer"

    class Wrong:
        sees = "everything"

    with pytest.raises(
        InputError, match=r"^verifier: sees must be one of answer, thought, both, not 'e"
    ):
        ObjectVerifier(Wrong())


def encoder_of(read, sees):
    codec = TextCodec.load(BUNDLED / "verifier")
    template = {"prefix": "{problem}\n", "step_suffix": "\n", "marker": "\n", "strip": True}
    fields = {"name": "t", "template": template, "read": read, "activation": "sigmoid"}
    fields |= {"head": {"kind": "linear", "layers": ["score"]}, "sees": sees}
    return PathEncoder(VerifierSpec.model_validate(fields), codec), codec


@pytest.mark.parametrize("read", ["step_end", "marker", "end"])
@pytest.mark.parametrize(
    ("sees", "are_read", "text"),
    [
        ("answer", [False, False, False, True, True], "Tim has 5.\nIt is 3.\n3.\n"),
        ("both", [True, True, False, True, True], "Tim has 5.\nIs it 4?\nNo.\nIt is 3.\n3.\n"),
    ],
)
def test_what_is_not_seen_leaves_no_trace_in_the_text(path, read, sees, are_read, text):
    encoder, codec = encoder_of(read, sees)
    found = encoder.encode("Tim has 5.", path)
    assert [bool(each.read_at) for each in found] == are_read
    assert codec.decode(found[-1].token_ids) == text


@pytest.mark.parametrize("read", ["step_end", "marker", "every_token"])
def test_steps_that_were_not_scored_are_read_with_the_next(path, read):
    encoder, _ = encoder_of(read, "both")
    one_by_one = encoder.encode("Tim has 5.", path)
    (whole,) = encoder.encode("Tim has 5.", path[-1:], lambda node: node.root)
    (half,) = encoder.encode("Tim has 5.", path[-1:], lambda node: path[1])
    assert whole.read_at == [at for each in one_by_one for at in each.read_at]
    assert whole.sizes == [size for each in one_by_one for size in each.sizes]
    assert half.read_at == [at for each in one_by_one[2:] for at in each.read_at]
    assert len(half.sizes) == 2, "the blank step has nothing to read"


def test_in_a_dialogue_a_plus_of_a_step_is_no_mark():
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    codec = TextCodec.load(BUNDLED / "verifier", template)
    encoder = PathEncoder(family("rlhflow").spec, codec)
    nodes = path_of(new_tree(), ("2+3=5", False), ("5+1=6", False), ("6+0=6", False))
    one_by_one = encoder.encode("Tim has 2.", nodes)
    (whole,) = encoder.encode("Tim has 2.", nodes[-1:], lambda node: node.root)
    assert whole.read_at == [at for each in one_by_one for at in each.read_at]
    assert whole.sizes == [1, 1, 1]


# --- a verifier that is a Python function ----------------------------------------------------


def raises(problem, steps):
    raise ValueError("no\nlicence")


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (raises, "verifier raises on problem 7, step 2: it raised ValueError: no licence"),
        (lambda p, s: "good", "it returned str, not a finite float"),
        (lambda p, s: float("nan"), "it returned nan, not a finite number"),
        (lambda p, s: 10**400, "it returned int, not a finite float"),
        (lambda p: 1.0, "it raised TypeError"),
    ],
)
def test_what_a_function_may_do_wrong_is_one_line(function, complaint):
    tree = new_tree(problem_id=7, text="1+1?")
    with pytest.raises(InputError, match=complaint) as caught:
        CallableVerifier(function).score(path_of(tree, ("a", False), ("b", False))[1:])
    assert "\n" not in str(caught.value)

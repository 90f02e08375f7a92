"""Ways of reading answers: what is noted on ended replies, and who goes by it."""

import pytest

from beamwright import Solver
from beamwright.config import Section
from beamwright.engine.decisions import store_answers
from beamwright.errors import InputError, PolicyError
from beamwright.search.answers import ANSWERS, Code, Mathematics, make_answers
from beamwright.search.choose import choose
from beamwright.tree import StopReason
from fakes import grow, new_tree

EGGS = "Jack has 70 eggs. In April Jack gets 9 eggs. How many eggs does Jack have now?"
SMALL = {"n": 8, "width": 2, "choose": "majority", "verifier": "none"}
PARITY = """
from beamwright.config import Section
from beamwright.search.answers import extract_answer
from beamwright.search.answers import answers


@answers("parity", meaning="even or odd")
class Parity(Section):
    def read(self, text):
        return extract_answer(text)

    def key(self, answer, notes):
        return "even" if int(answer) % 2 == 0 else "odd"
"""


class Sql(Section):
    """Queries, equal where the verifier saw equal results."""

    def read(self, text):
        return Code().read(text)

    def key(self, answer, notes):
        return notes.get("result", answer)


def ended(*texts):
    tree = new_tree()
    return grow(tree, tree.root, texts, StopReason.EOS)


def test_queries_vote_by_what_they_give():
    queries = ["SELECT a FROM t WHERE b = 'x'", "SELECT b FROM t", "select a from t where a < 3"]
    nodes = ended(*(f"Thus:\n```sql\n{query}\n```" for query in queries))
    for node, result in zip(nodes, ("[(1,), (2,)]", "[('x',)]", "[(1,), (2,)]"), strict=True):
        node.notes["result"] = result
    store_answers(Sql(), nodes)
    assert [node.answer for node in nodes] == queries
    assert nodes[0].vote == nodes[2].vote == "[(1,), (2,)]"
    assert choose([node.vote for node in nodes], [0.5] * 3, [True] * 3, "majority") == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("one\n```python\nx = 1\n```\nthen\n```\ny = 2  \nz\n```\n", "y = 2  \nz"),
        ("no block", None),
        ("```\n\n```", None),
        ("```\nnever closed", None),
    ],
)
def test_code_is_the_last_block(text, answer):
    assert Code().read(text) == answer


LETTERS = "6 * 7?\n\nA) 40\nB) 42 eggs\n\nAnswer with the letter."


@pytest.mark.parametrize(
    ("way", "texts", "votes"),
    [
        (make_answers("math", {}), [r"\boxed{27.0}", "hm"], ["27", None]),
        (
            make_answers("math", {}, LETTERS),
            ["**B**", "B) 42 eggs", "The answer is 42.", "It is B", "The answer is A because."],
            ["B", "B", "B", "B", "A"],
        ),
        (Code(), [f"```\n{code}\n```" for code in ("a  \nb", "a\nb", "A")], ["a\nb", "a\nb", "A"]),
    ],
)
def test_equal_answers_are_one_vote(way, texts, votes):
    nodes = ended(*texts)
    store_answers(way, nodes)
    assert [node.vote for node in nodes] == votes


@pytest.mark.parametrize("key", [lambda *_: 1 / 0, lambda *_: 7])
def test_one_that_fails_ends_the_search_and_is_named(key):
    way = Mathematics()
    object.__setattr__(way, "key", key)
    with pytest.raises(PolicyError, match="answers Mathematics"):
        store_answers(way, ended(r"\boxed{1}"))


@pytest.fixture
def plugin(tmp_path):
    file = tmp_path / "parity.py"
    file.write_text(PARITY, encoding="utf-8")
    yield str(file)
    ANSWERS.pop("parity", None)


def test_candidates_vote_as_a_plugin_says(plugin):
    with Solver(plugins=[plugin], answers="parity", temperature=2.0, **SMALL) as solver:
        found = solver.solve(EGGS)
    votes = [each.vote for each in found.candidates if each.vote]
    assert {"even", "odd"} >= set(votes) != set()
    most = max(sorted(set(votes)), key=votes.count)
    if votes.count("even") != votes.count("odd"):
        assert ("even" if int(found.answer) % 2 == 0 else "odd") == most
    assert found.to_json()["settings"]["search"]["answers"] == "parity"


def test_a_vote_of_a_plugins_kind_ends_the_search(plugin):
    how = {**SMALL, "stop_votes": True, "temperature": 0.0}
    with Solver(plugins=[plugin], answers="parity", **how) as solver:
        found = solver.solve(EGGS)
    assert {each.vote for each in found.candidates} == {"odd"}


def test_an_unknown_name_is_one_line():
    with pytest.raises(InputError, match=r"--answers 'maths' is unknown\. Did you mean math"):
        Solver(answers="maths", **SMALL)
    assert isinstance(make_answers("math", {}), Mathematics)

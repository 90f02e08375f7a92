"""Text that is final: never taken back, and as the answer begins, under every strategy."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest

import engines
from beamwright.errors import Cancelled
from beamwright.search import STRATEGIES
from beamwright.serve.answers import settled_text, token_logprobs, unchanging_prefix
from beamwright.serve.body import ApiError
from beamwright.serve.job import ReplyText, SearchJob
from beamwright.solver.solution import Solution
from beamwright.tree import NodeState, SearchTree, StopReason
from tables import beside

CASES = beside(__file__)
COMMITS = [name for name, row in STRATEGIES.items() if row.commits]
assert not {"lookahead", "deepconf", "revise"} & set(COMMITS), "they come back"


def grown(*specs):
    """A tree of (lineage, step text, state)."""
    tree = SearchTree(0, (1, 2), "?")
    nodes = {(): tree.root}
    for places, text, state in specs:
        lineage = tuple(places)
        parent = nodes[lineage[:-1]]
        if len(parent.children) <= lineage[-1]:
            tree.expand(parent, lineage[-1] + 1 - len(parent.children))
        node = nodes[lineage] = parent.children[lineage[-1]]
        node.text, node.state = parent.text + text, NodeState(state)
    return tree


@pytest.mark.parametrize(("specs", "said"), CASES["begins"])
def test_what_all_that_can_win_begin_with(specs, said):
    assert settled_text(grown(*specs)).said == said


# --- of thoughts -----------------------------------------------------------------------------


def extended(tree, above, *steps):
    """Steps below a node: (text, is a thought)."""
    for text, thought in steps:
        (node,) = tree.expand(above, 1)
        node.text, node.thought, node.state = above.text + text, thought, NodeState.KEPT
        node.stop = StopReason.THOUGHT_END if thought and text.endswith(".") else None
        above = node
    return above


@pytest.mark.parametrize(("first", "second", "final"), CASES["thoughts"])
def test_of_what_is_said_nothing_is_final_before_the_thought_is(first, second, final):
    tree = grown()
    for steps in (first, second):
        extended(tree, tree.root, *steps)
    assert settled_text(tree) == ReplyText(*final)


@pytest.mark.parametrize(("text", "stops", "held"), CASES["held"])
def test_what_may_yet_change_is_held_back(text, stops, held):
    assert unchanging_prefix(text, stops) == held


# --- options drawn at random: whatever is asked for, nothing is taken back --------------------

LETTERS = "EQ[ Wsot.`\n0Oe"  # of which the tiny model says much


def drawn(rng):
    """Options of one search: what it is, and what may end it."""
    width, always = rng.choice([1, 2, 4]), CASES["always"]
    options = {name: rng.choice(values) for name, values in always.items()}
    options |= {"search": rng.choice(COMMITS), "width": width, "seed": rng.randrange(10**6)}
    options["n"] = width * rng.choice([1, 2, 3, 4])
    votes = options["choose"] in ("majority", "weighted")
    some = {**CASES["some"], "stop_votes": (0.4 * votes, [True])}
    options |= {k: rng.choice(of) for k, (share, of) in some.items() if rng.random() < share}
    if rng.random() < 0.5:
        stops = ("".join(rng.choices(LETTERS, k=rng.choice([1, 2, 3]))) for _ in range(3))
        options["stop_strings"] = tuple(stops)
    return options


@pytest.mark.parametrize("speculation", ["off", "truncate"])
@pytest.mark.parametrize("times", [8, pytest.param(25, marks=pytest.mark.nightly)])
def test_it_only_grows_and_the_answer_begins_with_it(generator_folder, speculation, times):
    rng, early = random.Random(speculation), 0
    with engines.tiny_solver(generator_folder, speculation=speculation) as solver:
        for _ in range(times):
            going = []
            for _ in range(5):
                options, said = drawn(rng), [""]
                stops = options.get("stop_strings", ())

                def hear(report, said=said, stops=stops):
                    said.append(settled_text(report.tree, stops).said)

                problem = f"Ann has {rng.randrange(9)} apples."
                handle = solver.submit(problem, on_round=hear, **options)
                going.append((options, said, handle))
                if rng.random() < 0.1:
                    handle.cancel()
            for options, said, handle in going:
                try:
                    solution = handle.result(60)
                except Cancelled as error:
                    solution = error.partial
                texts = [*said, *([] if solution is None else [solution.text])]
                assert all(b.startswith(a) for a, b in pairwise(texts)), options
                early += bool(said[-1])
    assert early > 10, "or nothing was tried"


def test_half_a_character_is_a_token_of_its_own():
    pieces, tree = ["\u00e9".encode()[:1], "\u00e9".encode()[1:], b"a", b""], grown()
    tree.expand(tree.root, 1)
    (step,) = tree.root.children
    step.token_ids, step.logprobs = (0, 1, 3, 2), (-0.5, float("-inf"), -1.0, -1.0)
    step.top = (((2, -0.25),), (), (), ())
    job = SearchJob("tiny", "Hi", {})
    candidate = SimpleNamespace(text="\u00e9", lineage=step.lineage)
    job.outcome = Solution.__new__(Solution)
    object.__setattr__(job.outcome, "tree", tree)
    first, second = token_logprobs(job, candidate, pieces, 5)
    assert bytes(first["bytes"] + second["bytes"]).decode() == "\u00e9"
    assert first["top_logprobs"] == [{"token": "a", "logprob": -0.25, "bytes": [97]}]
    assert second["logprob"] == -9999.0
    with pytest.raises(ApiError, match="does not return each token"):
        token_logprobs(job, candidate, [], 0)

"""Steps that nobody judges go on by a child each; the strategy is asked when none is left."""

import random
import shutil
from functools import partial

import pytest

from beamwright import Solver
from beamwright.engine.decisions import StopRule
from beamwright.engine.scoring import VerifyEveryRule
from beamwright.errors import InputError
from beamwright.search import STRATEGIES, make_strategy, round_rng
from beamwright.sections import SearchSettings, StopSettings
from beamwright.tree import NodeState, StopReason
from engines import PROBLEM
from fakes import Grouping, ScriptedExecutor, new_tree
from played import Loop, new_run

EOS, GOES_ON, THOUGHT_END = StopReason.EOS, StopReason.DELIMITER, StopReason.THOUGHT_END
NAMES = sorted(STRATEGIES)


def by_chance(node, ends=0.15):
    """Stops and scores that are the lineage's own."""
    rng = random.Random(str(node.lineage))
    return (EOS if rng.random() < ends else GOES_ON), rng.random()


class Thinking(ScriptedExecutor):
    """Its paths begin with a thought of one to four steps."""

    def _step(self, node):
        event = super()._step(node)
        length = random.Random(str(node.lineage[:2])).randint(1, 4)
        if node.depth > length:
            return event
        stop = THOUGHT_END if node.depth == length else GOES_ON
        return type(event)(**{**vars(event), "stop": stop, "thought": True})


def search(
    name="beam", judges=None, script=by_chance, executor=None, tree=None, stop=(), **settings
):
    """A whole search, and what was heard of it: run, executor, reports."""
    found = SearchSettings(search=name, n=4, width=2, **{"max_rounds": 6, **settings})
    executor, reports = executor or ScriptedExecutor(script), []
    run = new_run(
        tree or new_tree(),
        judges=judges or VerifyEveryRule(found.verify_every),
        rule=StopRule(StopSettings(**dict(stop)), found),
    )
    loop = Loop(executor, make_strategy(found), Grouping(), rng=partial(round_rng, found))
    loop.run([run], reports.append)
    return run, executor, reports


def steps_of(tree):
    return [node for node in tree.nodes() if node.parent is not None and node.turn is None]


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_scored_follows_from_the_path(name, every):
    """Every strategy, to its end; each step is judged, or goes on by one child within its round."""
    run, executor, _ = search(name, verify_every=every)
    scored = {node for nodes in executor.scored for node in nodes}
    assert run.tree.finished() or run.tree.reason_fewer
    for node in steps_of(run.tree):
        if not node.answers or node.state is NodeState.OPEN:
            continue
        assert (node in scored) == (node.ended or len(node.reply()) % every == 0)
        if node not in scored:
            assert [child.is_continuation for child in node.children] == [True]
            assert node.score == next(
                (step.score for step in reversed(node.reply()[:-1]) if step in scored), None
            )
        elif node.children:
            assert not any(child.is_continuation for child in node.children if not child.turn)


@pytest.mark.parametrize("name", NAMES)
def test_thoughts_that_nobody_sees_are_carried_to_their_answers(name):
    run, executor, _ = search(name, VerifyEveryRule(1, "answer"), executor=Thinking(by_chance))
    scored = {node for nodes in executor.scored for node in nodes}
    assert scored
    assert not any(node.thought for node in scored)
    thoughts = [node for node in steps_of(run.tree) if node.thought and not node.greedy]
    assert all(len(node.children) == 1 for node in thoughts)


def test_a_judged_path_waits_for_those_that_go_on():
    """One path's thought is a step long, the other's four: both are ranked in one round."""
    _, _, reports = search(judges=VerifyEveryRule(1, "answer"), executor=Thinking(by_chance))
    first = [report for report in reports if report.round == 1]
    assert len(first) > 1
    *before, last = first
    assert not any(report.pruned for report in before)
    assert len(last.candidates) == 4
    assert {node.round for node in last.candidates} == {1}


def test_a_verifier_that_answers_each_step_is_not_given_every_second():
    class Dialogue:
        name, answers_each_step, sees = "dialogue", True, "both"

    assert VerifyEveryRule.for_verifier(Dialogue(), 1) == VerifyEveryRule(1, "both")
    with pytest.raises(InputError, match=r"^--verify-every 2: verifier dialogue must score every"):
        VerifyEveryRule.for_verifier(Dialogue(), 2)


@pytest.mark.parametrize("level", [1, 2, 4, 5])
def test_a_budget_that_is_spent_within_a_round_ends_the_search(level):
    """Unjudged paths have the score of their last judged step, and are ranked by it."""

    def endless(node):
        return by_chance(node, ends=0)

    budget = {"token_budget": 8 * level}  # four paths, two tokens each
    run, _, reports = search(script=endless, stop=budget, verify_every=3)
    assert len(reports) == level
    left = run.tree.candidates()
    assert len(left) == 4
    assert run.tree.reason_fewer == (
        f"4 of 4 paths were unfinished when --token-budget {8 * level} was spent"
    )
    assert {node.depth for node in left} == {level}
    judged = [next((n.step_score for n in node.path() if n.depth == 3), None) for node in left]
    assert [node.score for node in left] == judged


# --- real models -----------------------------------------------------------------------------


SMALL = {"n": 8, "width": 2, "max_rounds": 3, "step_tokens": 4, "ignore_eos": True}


def test_what_a_path_is_worth_does_not_depend_on_how_often_the_verifier_is_asked():
    """The bundled verifier multiplies what it thinks of each token, and reads all of them."""
    problem = "Ann has 12 apples. In May Ann sells 3 apples. How many apples does Ann have now?"
    with Solver(search="best-of-n", n=4, dtype="float64") as solver:
        each, third, last = (
            [c.score for c in solver.solve(problem, verify_every=every).candidates]
            for every in (1, 3, 100)
        )
    assert third == pytest.approx(each)
    assert last == pytest.approx(each)


def test_what_it_would_not_do_is_refused_in_a_line(make_solver):
    with pytest.raises(InputError, match=r"^--verify-every 2 has no effect with --verifier none$"):
        make_solver(verify_every=2, verifier="none", search="majority")
    solver = make_solver(verifier=lambda problem, steps: float(len(steps)), **SMALL)
    assert [c.score for c in solver.solve(PROBLEM, verify_every=2).candidates] == [6.0] * 8
    assert solver.score(PROBLEM, ["a", "b", "c"]).score == 3.0


@pytest.mark.nightly
def test_thoughts_that_the_verifier_does_not_see_are_carried_alike(tmp_path):
    """A thought in many steps, none of them scored; blanks behind it neither."""
    options = {"model": "bundled:thinking", "verifier": "bundled", "n": 2, "width": 2}
    options |= {"thought_steps": "sentences", "max_tokens": 300, "dtype": "float64"}
    problem = "Ann has 12 apples. In May Ann sells 3 apples. How many apples does Ann have now?"
    file, files = tmp_path / "search.json", []

    def keep(report):
        files.append(shutil.copy(file, tmp_path / f"{len(files)}.json"))

    with Solver(**options) as solver:
        expected = solver.solve(problem, on_round=keep, checkpoint=file)
        assert solver.resume(files[len(files) // 2]).tree_hash == expected.tree_hash
        whole = solver.solve(problem, thought_steps="auto").tree
    steps = [node for node in expected.tree.nodes() if node.parent]
    scored = [node for node in steps if node.step_score is not None]
    assert sum(node.thought for node in steps) > 8
    assert scored
    assert all(node.said.strip() and not node.thought for node in scored)
    with Solver(**options, kv_memory="6MiB", speculation="exact", batching="continuous") as solver:
        assert solver.solve(problem).tree_hash == expected.tree_hash
    thoughts = [node for node in whole.nodes() if node.thought]
    assert {node.depth for node in thoughts} == {1}, "whole, where nobody sees them"

"""--verify-every on real models: equal trees whatever the schedule, and what it saves."""

from __future__ import annotations

import shutil

import pytest

from beamwright import Solver
from beamwright.errors import InputError
from engines import PROBLEM

SMALL = {"n": 8, "width": 2, "max_rounds": 3, "step_tokens": 4, "ignore_eos": True}


def test_fewer_calls_score_fewer_steps(make_solver, verifier_folder):
    def counted(every):
        options = {**SMALL, "max_rounds": 12 // every, "search": "best-of-n"}
        solver = make_solver(verifier=str(verifier_folder), verify_every=every, **options)
        return solver.solve(PROBLEM).tokens

    every_step, fourth = counted(1), counted(4)
    assert fourth.generated == every_step.generated
    assert fourth.verifier_prefilled < every_step.verifier_prefilled


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
    with pytest.raises(InputError, match=r"^--verify-every 2: does nothing with --verifier none$"):
        make_solver(verify_every=2, verifier="none", search="majority")
    solver = make_solver(verifier=lambda problem, steps: float(len(steps)), **SMALL)
    assert [c.score for c in solver.solve(PROBLEM, verify_every=2).candidates] == [6.0] * 8
    assert solver.score(PROBLEM, ["a", "b", "c"]).score == 3.0


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

"""`--thinking`: budgets, soft and hard closes, on the bundled thinking model; the same trees under
every schedule."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from beamwright import Solution, Solver
from beamwright.errors import InputError
from beamwright.models.hub import BUNDLED
from beamwright.tree import Node

PROBLEM = json.loads((BUNDLED / "test.jsonl").read_text().splitlines()[0])["problem"]
SHARED: dict[str, Any] = {"model": "bundled:thinking", "verifier": "none", "max_tokens": 500}


def solved(**options: Any) -> tuple[Solution, list[Node]]:
    """A search, and its steps."""
    trees = []
    named = {**SHARED, "search": "majority", "n": 4, "thought_steps": "whole", **options}
    with Solver(**named) as solver:
        found = solver.solve(PROBLEM, on_round=lambda report: trees.append(report.tree))
    return found, [node for node in trees[-1].nodes() if node.parent is not None]


def thought_tokens(steps: list[Node]) -> list[int]:
    """Of each path's first step, where thoughts are whole."""
    return [len(step.token_ids) for step in steps if step.thought and step.depth == 1]


def test_without_a_budget_every_path_has_one_thought_and_an_answer_behind_it():
    found, steps = solved()
    assert len(thought_tokens(steps)) == 4
    assert {step.stop for step in steps if step.thought} == {"thought_end"}
    ends = [step for step in steps if step.complete]
    assert all("\\boxed{" in end.said and len(end.said) < len(end.text) for end in ends)
    assert found.answer is not None


def test_a_budget_is_a_hard_one_and_an_answer_follows():
    _, steps = solved(thinking=20, soft_close=2)
    marked = [step for step in steps if step.thought]
    assert {len(step.token_ids) for step in marked} == {21}  # and the end
    assert {step.stop for step in marked} == {"thought_end"}
    assert all(step.logprobs[-1] < 0 for step in marked)  # as likely as it was, imposed or not
    assert all("\\boxed{" in step.said for step in steps if step.complete)


def test_off_tells_the_template_and_closes_what_is_begun_all_the_same():
    _, steps = solved(thinking="off")
    assert not any(step.thought for step in steps)
    told = {"template_args": {"enable_thinking": True}, "thinking": "off"}
    _, steps = solved(**told)
    assert {len(step.token_ids) for step in steps if step.thought} <= {2}
    assert all("\\boxed{" in step.said for step in steps if step.complete)


def test_a_message_is_said_before_the_end_even_where_it_ends_a_step():
    message = "\n\nTime is up.\n\n"
    for cut in ("whole", "paragraphs"):
        _, steps = solved(thinking=20, soft_close=2, close_message=message, thought_steps=cut)
        last = [step for step in steps if step.thought and not step.thinking]
        assert len(last) == 4
        assert all(step.text.endswith(message) for step in last)


def test_a_soft_close_comes_in_the_last_quarter_where_the_end_is_likely():
    _, steps = solved(thinking=40, soft_close=1e-9)
    assert all(30 < length < 41 for length in thought_tokens(steps))
    _, hard = solved(thinking=40, soft_close=2)
    assert set(thought_tokens(hard)) == {41}


def test_the_last_token_of_a_path_is_a_limit_above_all():
    found, steps = solved(thinking=40, max_tokens=30, soft_close=2)
    assert {step.stop for step in steps} == {"path_limit"}
    assert all(step.thinking and step.said == "" for step in steps)
    assert found.answer is None


@pytest.mark.parametrize("thinking", ["on", 100])
def test_a_model_that_marks_no_thoughts_cannot_be_made_to_think(thinking):
    with (
        pytest.raises(InputError, match=r"--thinking .*no tokens for thoughts \(<think>"),
        Solver(thinking=thinking) as solver,
    ):
        solver.solve(PROBLEM)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("thinking", "some", "write auto, on, off or tokens"),
        ("thinking", -1, "write auto, on, off or tokens"),
        ("thought_steps", "words", "cuts no thoughts"),
        ("close_message", "x" * 201, "at most 200 bytes"),
        ("soft_close", 0, "soft"),
    ],
)
def test_what_is_no_setting_is_said(option, value, said):
    with pytest.raises(InputError, match=said):
        Solver(**{option: value})


MESSAGE = {
    **{"thinking": 40, "soft_close": 0.001, "close_message": "\n\nStop.\n", "thought_steps": 8},
    **{"temperature": 1.2, "search": "beam", "n": 4, "verifier": "logprob"},
}


@pytest.mark.parametrize(
    "way",
    [
        {"max_batch": 3, "drafts": 4},
        {"kv_memory": "400KiB", "speculation": "exact"},
        {"batching": "grouped", "kv_memory": "420KiB", "attention": "dense"},
    ],
    ids=str,
)
def test_trees_do_not_depend_on_the_schedule(way):
    assert solved(**MESSAGE, **way)[0].tree_hash == solved(**MESSAGE)[0].tree_hash


def test_a_search_is_resumed_in_the_middle_of_its_thoughts(tmp_path):
    file, kept = tmp_path / "saved", tmp_path / "kept"

    def keep(report):
        if report.round == 3:
            shutil.copy(file, kept)

    named = {**SHARED, **MESSAGE, "thinking": 45, "dtype": "float64"}
    with Solver(**named) as solver:
        whole = solver.solve(PROBLEM, checkpoint=file, on_round=keep)
        assert solver.resume(kept).tree_hash == whole.tree_hash
    with Solver(**{**named, "thinking": 30}) as solver, pytest.raises(InputError, match="thinking"):
        solver.resume(kept)

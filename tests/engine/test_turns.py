"""Asking again: what the model reads behind a turn, what is scored, what is kept."""

import pytest

from beamwright.errors import InputError
from engines import CHAT, grow

TALK = {
    "search": "revise",
    "chat_template": CHAT,
    "n": 4,
    "max_tokens": 10,
    "max_rounds": 30,
    "critique_prompt": "be a cab",
    "revision_prompt": "dab",
}


def test_a_turn_is_rendered_by_the_chat_template_behind_the_reply(make_solver):
    solver = make_solver(**TALK)
    _, tree = grow(solver)
    codec = solver._machinery.reader.codec
    turns = [node for node in tree.nodes() if node.turn is not None]
    assert {node.turn.answers for node in turns} == {False, True}
    ended_by_eos = 0
    for node in turns:
        last = node.parent.token_ids[-1]  # this model's paths end with other tokens, too
        rendered = codec.decode_raw(([last] if last == 2 else []) + list(node.token_ids))
        assert rendered == f"<eos><bos>{node.turn.text} a:"
        ended_by_eos += last == 2
    assert ended_by_eos


def test_critiques_are_not_scored_and_turns_are_not_generated(make_solver, verifier_folder):
    solver = make_solver(**TALK, verifier=str(verifier_folder))
    solution, tree = grow(solver)
    steps = [node for node in tree.nodes() if node.parent is not None and node.turn is None]
    assert {node.answers for node in steps} == {False, True}
    assert all(node.step_score is None for node in steps if not node.answers)
    assert all(node.step_score is not None for node in steps if node.answers and node.step_text)
    assert solution.tokens.generated == sum(len(node.token_ids) for node in steps)
    assert solution.tree_stats.nodes == len(steps)
    given = sum(len(node.token_ids) for node in tree.nodes() if node.turn is not None)
    assert solution.tokens.generator_prefilled >= len(tree.root.token_ids) + given


def test_a_new_answer_is_scored_as_if_it_stood_behind_the_problem(make_solver, verifier_folder):
    solver = make_solver(**TALK, verifier=str(verifier_folder), dtype="float64")
    _, tree = grow(solver)
    verifier = solver.verifier
    for leaf in tree.finished():
        again = type(tree)(0, tree.root.token_ids, tree.root.problem_text)
        node = again.root
        for step in leaf.reply():
            (node,) = again.expand(node, 1)
            again.commit(node, step.token_ids, step.logprobs, step.stop, step.text)
            (score,) = verifier.score([node])
            assert score == pytest.approx(step.step_score, abs=1e-9)
            if step is not leaf:
                again.keep(node)
        verifier.release(list(again.nodes()))


def test_a_turn_that_the_context_cannot_hold_leaves_the_draft(make_solver):
    free = make_solver(**TALK)
    _, tree = grow(free)
    longest = max(node.end for node in tree.nodes() if node.replies_to is tree.root)
    tight = make_solver(**TALK, context=longest + 2)
    solution, tree = grow(tight)
    assert all(node.turn is None for node in tree.nodes())
    assert len(solution.candidates) == 4
    assert all(
        candidate.stop == "eos" or candidate.tokens == 10 for candidate in solution.candidates
    )


def test_without_a_chat_template_the_search_does_not_begin(make_solver):
    with pytest.raises(InputError, match="needs a chat template"):
        make_solver(search="revise")
    with pytest.raises(InputError, match="omits the assistant's turns"):
        make_solver(search="revise", chat_template="{{ messages[0].content }}")


@pytest.mark.parametrize("revisions", [0, 65, 30_000_000])
def test_revisions_are_bounded(make_solver, revisions):
    with pytest.raises(InputError, match="revisions"):
        make_solver(**TALK, revisions=revisions)

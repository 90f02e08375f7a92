"""A number that is none is found where it arises, named, and what was finished is kept."""

import json

import numpy as np
import pytest
import torch

from beamwright.cli.output import print_json
from beamwright.engine.scoring import scored
from beamwright.errors import InputError, NotFiniteError
from beamwright.search.choose import choose
from engines import PROBLEM, assert_nothing_allocated

NAN, INF = float("nan"), float("inf")


class BrokenFrom:
    """A decoder's `logits` that turn into `value` from the k-th call on."""

    def __init__(self, decoder, call, value=NAN):
        self.real, self.call, self.value, self.count = decoder.logits, call, value, 0
        decoder.logits = self

    def __call__(self, hidden):
        self.count += 1
        found = self.real(hidden)
        return torch.full_like(found, self.value) if self.count > self.call else found


class Scores:
    """A verifier of the test's own."""

    default_aggregate = "last"
    probabilities = False
    name = "mine"

    def __init__(self, score):
        self.value = score

    def score(self, nodes):
        return [self.value(node) for node in nodes]

    def release(self, nodes):
        pass


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_logits_that_are_no_numbers_stop_the_search_and_keep_what_is_finished(
    make_solver, graphs, value
):
    with make_solver(n=8, graphs=graphs, verifier="none") as solver:
        solver.solve(PROBLEM)
        seen = []
        broken = BrokenFrom(solver.generator.decoder, 10**9, value)
        solver.solve(PROBLEM, on_round=lambda report: seen.append((broken.count, report)))
        call = next(count for count, report in seen if report.tree.finished()) + 1
        broken.count, broken.call = 0, call
        with pytest.raises(
            NotFiniteError, match=r"generator's logits .* problem 0, step \d+"
        ) as caught:
            solver.solve(PROBLEM)
        assert caught.value.partial.candidates
        json.dumps(caught.value.partial.to_json(), allow_nan=False)
        assert_nothing_allocated(solver)


def test_a_head_that_is_no_number_is_named_with_its_step(make_solver, verifier_folder):
    with make_solver(n=4, verifier=str(verifier_folder)) as solver:
        real, calls = solver.verifier._head, []

        def head(*tensors):
            values = real(*tensors)
            calls.append(len(values))
            if len(calls) > 1:
                values[0] = NAN
            return values

        solver.verifier._head = head
        message = rf"verifier {verifier_folder}: the score of problem 0, step 2 is nan"
        with pytest.raises(NotFiniteError, match=message):
            solver.solve(PROBLEM)
        assert_nothing_allocated(solver)


@pytest.mark.parametrize("value", [NAN, INF, 1e308])
@pytest.mark.parametrize("search", ["beam", "mcts", "particles", "deepconf", "dvts"])
def test_no_strategy_sees_a_score_that_cannot_be_summed(make_solver, search, value):
    more = {"verifier": "deepconf"} if search == "deepconf" else {}
    with make_solver(n=4, width=2, search=search, **more) as solver:
        solver.verifier.score = lambda nodes: [value for _ in nodes]
        with pytest.raises(NotFiniteError, match="problem 0, step 1"):
            solver.solve(PROBLEM)


def test_a_path_or_one_problem_of_a_batch_overflows_alone(make_solver):
    with make_solver(n=4, verifier="none", aggregate="prod") as solver:
        solver.verifier.score = lambda nodes: [1e20 for _ in nodes]
        overflow = r"the scores of problem 0, step 2, .* make 1e\+40"
        with pytest.raises(NotFiniteError, match=overflow):
            solver.solve(PROBLEM)
        solver.verifier.score = lambda nodes: [
            NAN if node.root.problem_id == "b" else 0.5 for node in nodes
        ]
        first, second, third = solver.solve_many([("a", PROBLEM), ("b", PROBLEM), ("c", PROBLEM)])
        assert isinstance(second, NotFiniteError)
        assert {first.problem_id, third.problem_id} == {"a", "c"}


@pytest.mark.parametrize("scores", [[0.5], [0.5, "good"], [0.5, [1]], [0.5, 1j]])
def test_a_verifier_that_returns_something_else(scores):
    with pytest.raises(InputError, match="verifier mine"):
        scored(Scores(None), [None, FakeNode()], scores)


class FakeNode:
    problem_id, depth = 7, 3


def test_numbers_of_other_libraries_are_numbers():
    events = scored(Scores(None), [FakeNode(), FakeNode()], [np.float32(0.5), None])
    assert [event.score for event in events] == [0.5, None]
    assert type(events[0].score) is float


# --- what shows numbers copes with all of them -------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("how", ["best", "majority", "weighted"])
def test_a_score_that_is_none_loses_the_choice(bad, how):
    assert choose(["1", "2"], [bad, 0.2], [True, True], how) == 1
    assert choose(["1", "2"], [bad, bad], [True, True], how) == 0


def test_json_stays_json(capsys):
    print_json({"a": NAN, "b": [INF, 1.5], "c": {"d": (-INF, "NaN")}})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": None, "b": [None, 1.5], "c": {"d": [None, "NaN"]}}

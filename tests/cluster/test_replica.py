"""A replica: problems beside each other, errors that cross processes, problems given back."""

import pickle
import threading

import pytest

from beamwright import Settings
from beamwright.cluster.replica import FarError, FarSolution, Replica
from beamwright.errors import CapacityError, InputError, NotFiniteError
from served import PATIENCE

OPTIONS = {
    "verifier": "logprob", "n": 8, "width": 4, "delimiter": "e", "max_tokens": 40,
    "max_rounds": 4, "kv_memory": "64MiB", "system_prompt": "", "max_step_tokens": 12,
}  # fmt: skip


class Ours(InputError):
    """Of a user's own file."""


@pytest.fixture
def replica(generator_folder):
    settings = Settings.build(model=str(generator_folder), **OPTIONS)
    replica = Replica(settings.model_dump(mode="json", exclude_unset=True))
    yield replica
    replica._solver.close()


def test_what_it_solves_is_what_its_solver_does(replica):
    assert replica.ready()
    found = replica.solve("a", "Ann has 3 apples.")
    alone = replica._solver.solve("Ann has 3 apples.", problem_id="a")
    assert isinstance(found, FarSolution)
    assert found.to_json()["tree_hash"] == alone.tree_hash
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_problem_of_its_own_fails_alone(replica):
    found = replica.solve("b", "word " * 500)
    assert found.kind == "ProblemTooLongError"
    assert isinstance(found.error(), InputError)
    assert "context" in str(found.error())
    assert isinstance(replica.solve("a", "Ann has 3 apples."), FarSolution)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputError("x"), InputError),
        (NotFiniteError("x"), NotFiniteError),
        (CapacityError("x", 1, 2, 3), CapacityError),
        (Ours("x"), InputError),
    ],
)
def test_errors_keep_whose_fault_they_are(error, kind):
    found = pickle.loads(pickle.dumps(FarError.of(error))).error()
    assert type(found) is kind
    assert str(found) == str(error)


@pytest.mark.parametrize(("n", "in_flight", "most"), [(8, 2, 2), (64, None, 1), (64, 3, 3)])
def test_as_many_are_in_flight_as_it_is_told(generator_folder, n, in_flight, most):
    settings = Settings.build(model=str(generator_folder), **{**OPTIONS, "n": n})
    replica = Replica(settings.model_dump(mode="json", exclude_unset=True), in_flight=in_flight)
    handles, seen = [], []

    def count(report):
        del report
        seen.append(sum(handle.begun and not handle.done() for handle in handles))

    for i in range(6):
        handles.append(replica._solver.submit(f"Problem {i}.", problem_id=i, on_round=count))
    for handle in handles:
        handle.result(60)
    assert max(seen) == most
    replica._solver.close()


def test_what_has_not_begun_can_be_given_back(replica):
    """With one tree at a time and a round that waits, all others have not begun."""
    solver, gate, reached = replica._solver, threading.Event(), threading.Event()
    submit = solver.submit

    def held(problem, *, problem_id):
        def on_round(report):
            del report
            reached.set()
            gate.wait(30)

        return submit(problem, problem_id=problem_id, on_round=on_round)

    solver.submit, found = held, {}
    threads = [
        threading.Thread(target=lambda i=i: found.setdefault(i, replica.solve(i, f"Problem {i}.")))
        for i in range(40)
    ]
    threads[0].start()
    assert reached.wait(30)
    for thread in threads[1:]:
        thread.start()
    while len(replica._handles) < 40:
        pass
    given = replica.give_back(5)
    gate.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert given == 5
    assert sum(each is None for each in found.values()) == 5
    assert replica.give_back(5) == 0
    (*_, again) = (name for name, each in found.items() if each is None)
    assert replica.solve(again, "word " * 500).kind == "ProblemTooLongError", (
        "it is not given back again"
    )
    solver.submit = submit

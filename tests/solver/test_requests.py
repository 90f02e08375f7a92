"""What one problem may have of its own: options, and parts that are the user's."""

import shutil
from typing import ClassVar

import pytest

from beamwright import Solver
from beamwright.config import Settings
from beamwright.errors import CapacityError, InputError, PolicyError
from beamwright.protocols import EndSearch, Extend, FinishPath, Prune
from beamwright.saved.checkpoint import read_checkpoint, resumed_settings
from beamwright.saved.identity import identity_of
from beamwright.search.beam import BeamSearch
from engines import PROBLEM, assert_nothing_allocated, tiny_solver
from tables import beside

CASES = beside(__file__)

SMALL = {"n": 4, "width": 2, "max_rounds": 3, "dtype": "float64"}


class Curious(BeamSearch):
    token_stats: ClassVar = frozenset({"entropy"})


@pytest.mark.parametrize("options", CASES["own"], ids=str)
def test_a_problem_has_the_tree_of_a_solver_with_its_options(
    make_solver, generator_folder, options
):
    with make_solver(**SMALL) as solver:
        found = solver.solve(PROBLEM, **options)
        assert_nothing_allocated(solver)
    with tiny_solver(generator_folder, **{**SMALL, **options}) as other:
        alone = other.solve(PROBLEM)
    assert found.tree_hash == alone.tree_hash
    assert found.answer == alone.answer
    assert found.settings.search == alone.settings.search
    assert found.settings.sampling == alone.settings.sampling


@pytest.mark.parametrize(
    ("options", "words"),
    [*CASES["refused"], ({"strategy": Curious}, "needs entropy of every token")],
    ids=str,
)
def test_a_bad_option_is_one_line_and_costs_nothing(make_solver, options, words):
    solver = make_solver(**SMALL)
    for call in (solver.solve, solver.submit, lambda p, **own: solver.solve_many([p], **own)):
        with pytest.raises(InputError, match=words):
            call(PROBLEM, **options)
    assert solver.solve(PROBLEM).rounds == 3
    assert_nothing_allocated(solver)


def test_a_resumed_search_needs_the_options_that_it_was_begun_with(make_solver, tmp_path):
    solver, file = make_solver(**SMALL), tmp_path / "saved.json"
    whole = solver.solve(PROBLEM, seed=3)
    solver.solve(PROBLEM, seed=3, checkpoint=file, max_rounds=3)
    with pytest.raises(InputError, match="--seed 3"):
        solver.resume(file)
    assert solver.resume(file, seed=3).tree_hash == whole.tree_hash


def test_every_request_has_the_settled_settings(make_solver):
    with make_solver(**SMALL, schedule="layerwise", speculation="auto") as solver:
        own = solver.solve(PROBLEM, temperature=0.5).settings
        many = [each.settings for each in solver.solve_many([(0, PROBLEM, {"seed": 3})])]
    for settings in (solver.settings, own, *many):
        schedule = settings.schedule
        assert (schedule.schedule, schedule.batching) == ("layerwise", "grouped")
        assert schedule.speculation == "off"
    assert own.sampling.temperature == 0.5
    assert Solver(solver.settings).settings == solver.settings


@pytest.mark.parametrize("in_flight", [None, 2])
def test_problems_that_fit_neither_together_nor_alone_all_come_out(make_solver, in_flight):
    """The last one in flight may be the first to be tried again alone."""
    peak = make_solver(schedule="in-gpu").solve(PROBLEM).kv.device_peak_bytes
    solver = make_solver(schedule="in-gpu", kv_memory=peak // 2)
    found = solver.solve_many([PROBLEM, PROBLEM], in_flight=in_flight)
    errors = found if in_flight is None else [each for _, each in found]
    assert [type(each) for each in errors] == [CapacityError] * 2
    assert_nothing_allocated(solver)


# --- one of several --------------------------------------------------------------------------


def test_problems_of_one_call_have_options_of_their_own(make_solver):
    solver = make_solver(**SMALL)
    own = [("few", PROBLEM, {"n": 2}), ("late", PROBLEM, {"seed": 3, "priority": -1}), PROBLEM]
    found = solver.solve_many(own, seed=2)
    alone = [
        solver.solve(PROBLEM, problem_id="few", n=2, seed=2),
        solver.solve(PROBLEM, problem_id="late", seed=3),
        solver.solve(PROBLEM, problem_id=2, seed=2),
    ]
    assert [each.tree_hash for each in found] == [each.tree_hash for each in alone]


def test_a_larger_priority_begins_first(make_solver):
    solver = make_solver(**SMALL)
    problems = [(k, PROBLEM, {"priority": priority}) for k, priority in enumerate([0, 2, 1, 2])]
    begun = [problem_id for problem_id, _ in solver.solve_many(problems, in_flight=1)]
    assert begun == [1, 3, 2, 0]


def test_each_ends_at_its_own_deadline_from_where_its_search_begins(make_solver):
    """In a list only the first waits for nobody: the others' time begins as theirs do."""
    solver = make_solver(**{**SMALL, "max_rounds": 6})
    problems = [("short", PROBLEM, {"deadline": 1e-6}), ("long", PROBLEM, {"deadline": "1h"}), "x"]
    for in_flight in (1, 3):
        found = dict(solver.solve_many(problems, in_flight=in_flight))
        assert found["short"].rounds == 1
        assert "--deadline" in found["short"].reason_fewer
        alone = solver.solve(PROBLEM, problem_id="long")
        assert found["long"].tree_hash == alone.tree_hash


# --- parts of the user's own -------------------------------------------------------------------


def longer(problem, steps):
    return len(steps[-1]) / 100


def shorter(problem, steps):
    return -len(steps[-1]) / 100


def saved(solver, folder):
    """A checkpoint of the middle of a search, and how the search went on."""
    file, kept = folder / "search.json", folder / "kept.json"
    expected = solver.solve(
        PROBLEM,
        checkpoint=file,
        on_round=lambda report: report.round == 2 and shutil.copy(file, kept),
    )
    return kept, expected


def test_a_function_goes_on_with_its_own_searches_only(make_solver, tmp_path):
    file, expected = saved(make_solver(**SMALL, verifier=longer), tmp_path)
    assert make_solver(**SMALL, verifier=longer).resume(file).tree_hash == expected.tree_hash
    for other in (shorter, "logprob"):
        solver = make_solver(**SMALL, search="beam", verifier=other)
        with pytest.raises(InputError, match=r"was saved with --verifier 'python:.*longer@"):
            solver.resume(file)
    with pytest.raises(InputError, match=r"verifier python:.*longer@.*an object in Python"):
        resumed_settings(file, Settings())


class FirstOnly:
    """Follows the first child; the rest is dropped at the end."""

    def __init__(self, rounds=2):
        self.rounds = rounds

    def select(self, tree, rng):
        if tree.rounds == 0:
            return [Extend(tree.root, 2)]
        first = tree.candidates()[0]
        if first.ended or tree.rounds >= self.rounds:
            return [FinishPath(first), EndSearch("enough")]
        return [Extend(first, 2)]


class Lengths:
    """Scores in batches, as probabilities."""

    probabilities = True
    default_aggregate = "min"

    def __init__(self):
        self.batches = []

    def score(self, nodes):
        self.batches.append(len(nodes))
        return [1 / (1 + len(node.step_text)) for node in nodes]


def test_objects_take_the_place_of_names(make_solver, tmp_path):
    verifier = Lengths()
    solver = make_solver(
        **SMALL,
        ignore_eos=True,
        strategy=FirstOnly(),
        verifier=verifier,
        stop=lambda tree: "it is late" if tree.rounds == 5 else None,
    )
    file, expected = saved(solver, tmp_path)
    assert expected.rounds == 2
    assert verifier.batches
    assert solver.verifier.probabilities
    assert read_checkpoint(file).settings["search"].startswith("python:")
    options = {**SMALL, "ignore_eos": True, "verifier": verifier}
    again = make_solver(**options, strategy=FirstOnly()).resume(file)
    assert again.tree_hash == expected.tree_hash, "what a part holds in a list tells nothing apart"
    with pytest.raises(InputError, match=r"was saved with --search 'python:.*FirstOnly@"):
        make_solver(**options, strategy=FirstOnly(3)).resume(file)


def test_a_strategy_and_a_stop_of_ones_own(make_solver):
    """Of a solver, or of one problem."""
    solver, late = make_solver(**SMALL, search="best-of-n"), lambda tree: "it is late"
    alone = make_solver(**SMALL, strategy=BeamSearch, stop=late).solve(PROBLEM)
    found = solver.solve(PROBLEM, strategy=BeamSearch, stop=late)
    for each in (alone, found):
        assert each.rounds == 1
        assert "it is late" in each.reason_fewer
    assert found.tree_hash == alone.tree_hash
    assert solver.solve(PROBLEM, search="beam").rounds > 1


class PrunesAll:
    """Opens two paths, and leaves none."""

    def select(self, tree, rng):
        if tree.rounds == 0:
            return [Extend(tree.root, 2)]
        return [*map(Prune, tree.candidates()), EndSearch("enough")]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"strategy": PrunesAll()}, "ended the search without a candidate"),
        ({"stop": [lambda tree: True]}, "it returned bool, not a reason"),
    ],
)
def test_a_part_that_breaks_its_promise_is_named(make_solver, parts, words):
    with pytest.raises(PolicyError, match=words):
        make_solver(**SMALL, **parts).solve(PROBLEM)


def test_functions_of_the_same_code_are_told_apart_by_their_values():
    def made(bias):
        return lambda problem, steps: len(steps) + bias

    assert identity_of(made(1)) == identity_of(made(1)) != identity_of(made(2))

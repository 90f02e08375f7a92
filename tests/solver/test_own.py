"""A user's own parts: named in checkpoints, found by name, checked."""

import shutil

import pytest

from beamwright.config import Settings
from beamwright.errors import InputError, PolicyError
from beamwright.protocols import Complete, Extend, Finish, Prune
from beamwright.saved.checkpoint import read_checkpoint, resumed_settings
from beamwright.saved.identity import identity_of
from beamwright.search.beam import BeamSearch
from engines import PROBLEM

SMALL = {"n": 4, "width": 2, "max_rounds": 3, "dtype": "float64"}


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
    with pytest.raises(InputError, match=r"verifier python:.*longer@.*only Python has"):
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
            return [Complete(first), Finish("enough")]
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
    with pytest.raises(InputError, match=r"was saved with --search 'python:.*FirstOnly@"):
        make_solver(**SMALL, ignore_eos=True, strategy=FirstOnly(3), verifier=verifier).resume(file)


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
        return [*map(Prune, tree.candidates()), Finish("enough")]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"strategy": PrunesAll()}, "ends the search without a candidate"),
        ({"stop": [lambda tree: True]}, "it returned bool, not a reason"),
    ],
)
def test_a_part_that_breaks_its_promise_is_named(make_solver, parts, words):
    with pytest.raises(PolicyError, match=words):
        make_solver(**SMALL, **parts).solve(PROBLEM)


def test_identities_tell_code_and_values_apart():
    def made(bias):
        return lambda problem, steps: len(steps) + bias

    assert identity_of(made(1)) == identity_of(made(1)) != identity_of(made(2))
    assert identity_of(longer) != identity_of(shorter)
    counting = Lengths()
    before = identity_of(counting)
    counting.batches.append(3)
    assert identity_of(counting) == before, "what it holds in a list is no part of it"
    assert identity_of(FirstOnly(2)) == identity_of(FirstOnly(2)) != identity_of(FirstOnly(3))

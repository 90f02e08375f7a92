"""A user's own parts: named in checkpoints, found by name, checked."""

import shutil

import pytest

from beamwright import Solver
from beamwright.config import Settings
from beamwright.errors import InputError, PolicyError
from beamwright.protocols import Complete, Extend, Finish, Prune
from beamwright.saved.checkpoint import read_checkpoint, resumed_settings
from beamwright.saved.identity import identity_of
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


def test_a_stop_of_ones_own_ends_the_search_and_says_why(make_solver):
    found = make_solver(**SMALL, stop=lambda tree: "it is late").solve(PROBLEM)
    assert found.rounds == 1
    assert "it is late" in found.reason_fewer
    with pytest.raises(PolicyError, match="it returned bool, not a reason"):
        make_solver(**SMALL, stop=[lambda tree: True]).solve(PROBLEM)


class PrunesAll:
    """Opens two paths, and leaves none."""

    def select(self, tree, rng):
        if tree.rounds == 0:
            return [Extend(tree.root, 2)]
        return [*map(Prune, tree.candidates()), Finish("enough")]


def test_a_strategy_that_leaves_no_candidate_is_named(make_solver):
    with pytest.raises(PolicyError, match="ends the search without a candidate"):
        make_solver(**SMALL, strategy=PrunesAll()).solve(PROBLEM)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": object()}, "strategy: object has no method select"),
        ({"stop": 3}, "stop: int is no function of a tree"),
        ({"strategy": FirstOnly(), "search": "beam"}, "either strategy= .* or search="),
    ],
)
def test_what_lacks_a_method_is_refused(make_solver, options, words):
    with pytest.raises(InputError, match=words):
        make_solver(**options)


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


# --- options that do nothing -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "localty"}, "--schedule 'localty': did you mean locality"),
        ({"verifier_weights": "int8"}, "--verifier-weights int8: does nothing with --verifier lo"),
        ({"schedule": "in-gpu", "evict": "recompute"}, "--evict recompute: does nothing with"),
        ({"schedule": "in-gpu", "inter_beam": False}, "--no-inter-beam: does nothing with"),
        ({"schedule": "layerwise", "planner": "greedy"}, "--planner greedy: does nothing with"),
    ],
)
def test_an_option_that_does_nothing_is_an_error(generator_folder, options, words):
    with pytest.raises(InputError, match=words):
        Solver(model=str(generator_folder), **{"verifier": "logprob", **options})

"""Votes in waves: the next paths begin only if nothing has stopped the search."""

import pytest

from beamwright import Solver
from beamwright.engine.decisions import StopRule, check_stops, lead_confidence
from beamwright.errors import InputError
from beamwright.protocols import EndSearch, Extend, FinishPath
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings, StopSettings
from beamwright.tree import StopReason
from fakes import add_step, new_tree
from played import actions_of

PROBLEM = (
    "Jack has 70 eggs. In April Jack gets 9 eggs. In May Jack sells 19 eggs. "
    "How many eggs does Jack have now?"
)


def votes(**settings):
    return SearchSettings(search="majority", choose="majority", **settings)


def ended(tree, answers):
    """A tree whose paths have one step each, and these answers."""
    for answer, node in zip(answers, tree.expand(tree.root, len(answers)), strict=True):
        add_step(tree, node, f"\\boxed{{{answer}}}", (1,), stop=StopReason.EOS)
        node.answer = node.vote = answer
    tree.rounds += 1
    return tree


def test_a_wave_begins_when_the_one_before_has_ended():
    strategy, tree = make_strategy(votes(n=5, wave=2)), new_tree()
    assert actions_of(strategy, tree) == [Extend(tree.root, 2)]
    ended(tree, "ab")
    first, second = tree.root.children
    actions = actions_of(strategy, tree)
    assert actions == [FinishPath(first), FinishPath(second), Extend(tree.root, 2)]
    tree.finish(first), tree.finish(second)
    ended(tree, "ab")
    assert actions_of(strategy, tree)[-1] == Extend(tree.root, 1)


def test_without_a_wave_all_begin_and_the_last_wave_ends_the_search():
    tree = new_tree()
    assert actions_of(make_strategy(votes(n=5)), tree) == [Extend(tree.root, 5)]
    ended(tree, "aabbb")
    assert actions_of(make_strategy(votes(n=5, wave=2)), tree)[-1] == EndSearch()


@pytest.mark.parametrize(
    ("answers", "confidence"),
    [("", 0.0), ("a", 0.75), ("aa", 0.875), ("aaaa", 0.96875), ("ab", 0.5), ("aaab", 0.8125)],
)
def test_confidence_is_of_the_two_that_lead(answers, confidence):
    nodes = ended(new_tree(), answers).root.children if answers else []
    assert lead_confidence(nodes) == pytest.approx(confidence)
    if len(set(answers)) > 1:
        others = ended(new_tree(), answers + "c").root.children
        assert lead_confidence(others) == pytest.approx(confidence)


def test_the_search_stops_between_waves_alone():
    search, stop = votes(n=16, wave=4), StopSettings(stop_confidence=0.95)
    rule, tree = StopRule(stop, search), ended(new_tree(), "aaaa")
    why = rule.find_reason(tree, 0.0)
    assert "--stop-confidence" in why
    assert rule.is_reproducible(why)
    add_step(tree, tree.expand(tree.root, 1)[0], "still going", (1,))
    assert rule.find_reason(tree, 0.0) is None


@pytest.mark.parametrize(
    ("search", "said"),
    [
        (votes(n=8), "needs --wave"),
        (SearchSettings(choose="best"), "needs --choose majority, not best"),
    ],
)
def test_it_needs_waves_and_a_majority(search, said):
    with pytest.raises(InputError, match=said):
        check_stops(StopSettings(stop_confidence=0.9), search)


def test_waves_alone_change_nothing_but_the_time():
    shared = {"search": "majority", "verifier": "none", "n": 4, "dtype": "float64"}
    hashes = set()
    for options in ({}, {"wave": 3, "kv_memory": "600KiB"}):
        with Solver(**shared, **options) as solver:
            hashes.add(solver.solve(PROBLEM).tree_hash)
    assert len(hashes) == 1


def test_a_clear_vote_spares_the_other_waves():
    shared = {"search": "majority", "verifier": "none", "n": 16, "temperature": 0.0}
    with Solver(**shared, wave=4, stop_confidence=0.95) as solver:
        found = solver.solve(PROBLEM)
    assert len(found.candidates) == 4
    assert "12 of 16 paths" in found.reason_fewer


def test_a_search_ends_with_its_first_paths():
    with Solver(search="majority", verifier="none", n=8, step_tokens=8) as solver:
        found = solver.solve(PROBLEM, first_k=2)
    assert 2 <= len([each for each in found.candidates if each.stop == "eos"]) < 8
    assert "the first 2 had finished (--first-k)" in found.reason_fewer
    assert found.receipt["unrepeatable"] is None

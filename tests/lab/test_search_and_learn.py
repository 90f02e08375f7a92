"""search-and-learn's beam search, against a transcription of its loop over plain lists."""

import hashlib
from dataclasses import dataclass, replace

import pytest

from beamwright.declare import load_plugin
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason
from declared import restored
from fakes import add_step, new_tree
from played import actions_of, obey

with restored():  # other rooms' tests run for every strategy that there is
    from beamwright_lab import search_and_learn
    from beamwright_lab.search_and_learn import SearchAndLearnBeam, final_candidates, padded

PLUGIN = search_and_learn.__file__


@dataclass
class Beam:
    """A beam of the transcription. choices: which copy of its parent it was, from the root."""

    choices: tuple = ()
    pruned: bool = False


def chance(choices, salt):
    digest = hashlib.sha256(f"{salt} {choices}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def transcription(n, width, rounds, ends, salt):
    """Active beams of every round in list order, and finished ones in order of finishing."""
    active, levels, completed = [Beam() for _ in range(n)], [], []
    for _ in range(rounds):
        active = [beam for beam in active if not beam.pruned]
        if len(active) != n:
            repeats = n // len(active) + 1
            active = [replace(beam) for beam in (active * repeats)[:n]]
        copies = {}
        for beam in active:
            copy = copies.get(beam.choices, 0)
            copies[beam.choices] = copy + 1
            beam.choices = (*beam.choices, copy)
        levels.append([beam.choices for beam in active])
        ended = [chance(beam.choices, f"end {salt}") < ends for beam in active]
        completed += [b.choices for b, e in zip(active, ended, strict=True) if e]
        active = [b for b, e in zip(active, ended, strict=True) if not e]
        if not active:
            break
        scores = [chance(beam.choices, salt) for beam in active]
        top = sorted(range(len(scores)), key=scores.__getitem__)[-(n // width) :]
        for place, beam in enumerate(active):
            beam.pruned = place not in top
    return levels, completed


def ours(n, width, rounds, ends, salt):
    strategy, tree = _compat_beam(n, width, rounds), None
    tree, levels, completed = new_tree(), [], []
    while not tree.done:
        before = set(tree.finished())
        obey(tree, actions_of(strategy, tree))
        fresh = [node.lineage[1:] for node in tree.finished() if node not in before]
        completed += sorted(fresh, key=lambda choices: choices[::-1])
        nodes = tree.open_nodes()
        for node in nodes:
            choices = node.lineage[1:]
            end = chance(choices, f"end {salt}") < ends
            add_step(tree, node, "x", stop=StopReason.EOS if end else StopReason.DELIMITER)
            node.score = chance(choices, salt)
        if nodes:
            levels.append([node.lineage[1:] for node in nodes])
        tree.rounds += 1
    return tree, levels, completed


def _compat_beam(n, width, rounds):
    return SearchAndLearnBeam(search=SearchSettings(n=n, width=width, max_rounds=rounds))


@pytest.mark.parametrize("ends", [0.0, 0.2, 0.6])
@pytest.mark.parametrize(("n", "width"), [(4, 4), (8, 2), (9, 3), (16, 4), (10, 4), (3, 4)])
def test_the_same_beams_as_search_and_learn(n, width, ends):
    for salt in range(5):
        theirs, finished = transcription(n, width, 6, ends, salt)
        tree, levels, completed = ours(n, width, 6, ends, salt)
        assert [set(level) for level in levels] == [set(level) for level in theirs]
        assert completed == finished
        assert [node.lineage[1:] for node in final_candidates(tree.finished(), n)] == padded(
            finished, n
        )


@pytest.fixture
def declared():
    with restored():
        load_plugin(PLUGIN)
        yield


def test_a_search_returns_n_candidates_as_there(make_solver, declared):
    solution = make_solver(search="search-and-learn", n=8, width=2, max_rounds=30).solve("1+1?")
    assert len(solution.candidates) == 8
    assert {candidate.stop for candidate in solution.candidates} != {"round_limit"}

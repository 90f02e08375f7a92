from dataclasses import replace
from statistics import mean

import pytest

from beamwright.errors import InputError
from beamwright.sections import StepSettings
from beamwright.tree import NodeState, StopReason
from beamwright_lab.simulator.run import simulate
from beamwright_lab.simulator.synthetic import SyntheticSearch, foresight, grow
from simulated import GIB, case

PAPER = SyntheticSearch(64, 2, 128, 1920, 32)


def rounds(tree):
    found = {}
    for node in tree.nodes:
        found.setdefault(len(node.lineage), []).append(node)
    return [found[number] for number in sorted(found)]


def shared(tree):
    """Union over sum of the paths, at the end of every round."""
    end, tokens = {(): tree.prompt_tokens}, {(): tree.prompt_tokens}
    for node in tree.nodes:
        tokens[node.lineage] = node.tokens
        end[node.lineage] = end[node.lineage[:-1]] + node.tokens
    unions = sums = 0
    for beams in rounds(tree):
        paths = {node.lineage[:i] for node in beams for i in range(len(node.lineage) + 1)}
        unions += sum(map(tokens.__getitem__, paths))
        sums += sum(end[node.lineage] for node in beams)
    return unions / sums


@pytest.mark.parametrize(("width", "low", "high"), [(2, 0.115, 0.16), (4, 0.065, 0.085)])
@pytest.mark.parametrize("survival", ["random", "score"])
def test_as_much_is_shared_as_in_simulated_searches(width, low, high, survival):
    search = replace(PAPER, width=width, survival=survival)
    assert low < mean(shared(grow(replace(search, seed=seed))) for seed in range(2)) < high


def test_beam_search_keeps_n_candidates_in_every_round():
    tree = grow(PAPER)
    assert [len(beams) for beams in rounds(tree)] == [64] * 60
    kept = [node.state for node in rounds(tree)[10]].count(NodeState.KEPT)
    assert kept == 32
    assert {node.stop for node in rounds(tree)[-1]} == {StopReason.PATH_LIMIT}


@pytest.mark.parametrize("search", ["dvts", "dynamic"])
def test_the_strategy_that_grew_a_tree_foresees_better_than_its_scores_alone(search):
    made = replace(PAPER, search=search, survival="score", step_sigma=0.9, generate_tokens=256)
    usual = case("auto", 64 * GIB, grow(made), speculation="exact", step=StepSettings())
    known = simulate(replace(usual, foresees=foresight(made)))
    plain = simulate(usual)
    shares = [each.kept_tokens / each.speculated_tokens for each in (known, plain)]
    assert shares[0] > shares[1]


@pytest.mark.parametrize("sigma", [0.0, 0.5])
@pytest.mark.parametrize("search", ["beam", "best-of-n", "dvts"])
def test_every_final_path_has_all_its_tokens(search, sigma):
    tree = grow(SyntheticSearch(8, 2, 16, 200, 24, sigma, search=search))
    end = {(): 0}
    for node in tree.nodes:
        end[node.lineage] = end[node.lineage[:-1]] + node.tokens
    final = [end[node.lineage] for node in tree.nodes if node.state is NodeState.FINISHED]
    assert final == [200] * 8


@pytest.mark.parametrize(
    "changes", [{"width": 3}, {"num_beams": 0}, {"step_sigma": -1.0}, {"step_sigma": float("nan")}]
)
def test_impossible_searches(changes):
    with pytest.raises(InputError):
        grow(replace(PAPER, **changes))

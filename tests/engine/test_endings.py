"""How searches end: what stands, what votes, what is missing. The real loop, scripted."""

from contextlib import suppress

import pytest

from beamwright.config import Settings
from beamwright.engine.decisions import StopRule, check_stops, note_answers
from beamwright.errors import InputError
from beamwright.protocols import StepDecoded
from beamwright.search import make_strategy
from beamwright.search.choose import choose
from beamwright.search.defaults import with_defaults
from beamwright.search.reading import Mathematics
from beamwright.sections import SearchSettings, StopSettings
from beamwright.solver.describe import candidate_of, complete_nodes, final_nodes
from beamwright.tree import StopReason
from fakes import Grouping, ScriptedExecutor, new_tree
from played import Loop, new_run

EOS, GOING = StopReason.EOS, StopReason.DELIMITER


class Texts(ScriptedExecutor):
    """script: node -> (stop, score, text of the step)."""

    def _step(self, node):
        stop, _, text = self.script(node)
        return StepDecoded(node, (node.depth, 9), (-0.1, -0.2), stop, node.text + text)


def box(answer):
    return rf"\boxed{{{answer}}}"


def grown(script, on_round=None, stop=None, **search):
    """The tree of a whole search, and its settings."""
    settings = with_defaults(
        Settings(search=SearchSettings(**search), stop=StopSettings(**(stop or {})))
    )
    tree = new_tree()
    run = new_run(tree, rule=StopRule(settings.stop, settings.search))
    strategy = make_strategy(settings.search)
    loop = Loop(Texts(script), strategy, Grouping(), render_turn=lambda node, turn: (1, 2))
    with suppress(KeyboardInterrupt):
        loop.run([run], on_round)
    return tree, settings.search


def listed(tree, search):
    """Candidates as (answer, score, stop), and the chosen answer."""
    nodes = final_nodes(tree, search.n)
    note_answers(Mathematics(), nodes)
    found = [candidate_of(node) for node in nodes]
    complete = [each.stop == "eos" for each in found]
    votes, scores = [each.vote for each in found], [each.score for each in found]
    best = choose(votes, scores, complete, search.choose)
    return [(each.answer, each.score, each.stop) for each in found], found[best].answer


# --- revise ----------------------------------------------------------------------------------


def test_a_draft_that_ends_in_the_last_round_stands():
    def script(node):
        if node.lineage[1] == 0:
            return (EOS, 0.9, box(42)) if node.depth >= 3 else (GOING, 0.9, "a")
        return EOS, 0.2, box(node.depth)

    found, chosen = listed(*grown(script, search="revise", n=2, max_rounds=3))
    assert [stop for _, _, stop in found] == ["eos", "eos"]
    assert chosen == "42"


def test_broken_off_the_best_answer_of_every_path_stands():
    """Path 0 ends with a revision that is worse than its draft; path 1 is about to be revised."""

    def script(node):
        asked = sum(each.turn is not None for each in node.path())
        if node.lineage[1] == 1 and asked:
            return GOING, 0.5, "still thinking"
        return EOS, [0.9, None, 0.1][asked], [box(42), "bad", box(0)][asked]

    def stop(report):
        if report.round == 4:
            raise KeyboardInterrupt

    tree, _ = grown(script, stop, search="revise", n=2)
    assert [(node.text, node.score) for node in complete_nodes(tree)] == [(box(42), 0.9)] * 2


# --- deepconf --------------------------------------------------------------------------------


def low_votes(node):
    """Of six paths two are confident and say 5; path 5 goes on for longer."""
    path = node.lineage[1]
    stop = GOING if path == 5 and node.depth <= 2 else EOS
    return stop, [1, 9, 0.5, 0.5, 0.5, 9][path], box([7, 5, 7, 7, 7, 5][path])


DEEPCONF = {"search": "deepconf", "n": 6, "warmup": 2, "keep": 0.1, "choose": "majority"}


def test_paths_below_the_bar_do_not_vote_when_a_budget_ends_the_search():
    tree, search = grown(low_votes, **DEEPCONF)
    assert listed(tree, search) == ([("5", 9, "eos"), ("5", 9, "eos")], "5")
    tree, search = grown(low_votes, stop={"token_budget": 12}, **DEEPCONF)
    found, chosen = listed(tree, search)
    assert chosen == "5"
    assert found == [("5", 9, "eos"), ("5", 9, "round_limit")]
    assert tree.reason_fewer.startswith("1 of 6 paths were unfinished when --token-budget")


def test_votes_are_not_settled_while_voters_may_be_pruned():
    for name in ("deepconf", "revise"):
        search = SearchSettings(search=name, choose="majority")
        with pytest.raises(InputError, match=f"--stop-votes: with --search {name}"):
            check_stops(StopSettings(stop_votes=True), search)


# --- duplicates, and who is shown ------------------------------------------------------------


def test_equal_answers_all_vote_where_paths_do_not_compete():
    def script(node):
        path = node.lineage[1]
        return (GOING if path == 4 and node.depth <= 3 else EOS), None, box([3, 3, 3, 8, 8][path])

    options = {"search": "majority", "n": 5, "filter_duplicates": True}
    tree, search = grown(script, stop={"token_budget": 10}, **options)
    found, chosen = listed(tree, search)
    assert [answer for answer, _, _ in found] == ["3", "3", "3", "8", "8"]
    assert chosen == "3"
    assert tree.reason_fewer == "1 of 5 paths were unfinished when --token-budget 10 was spent"


def test_of_many_unfinished_paths_the_best_scored_are_listed():
    def script(node):
        return GOING, {0: 0.1, 1: 0.5, 2: 0.3, 3: 0.9}[node.lineage[-1] % 4], "x"

    def stop(report):
        if report.round == 2:
            raise KeyboardInterrupt

    tree, search = grown(script, stop, search="mcts", n=4, width=4)
    shown = final_nodes(tree, search.n)
    others = [node for node in tree.candidates() if node not in shown]
    assert len(shown) == search.n
    assert others
    assert min(node.score for node in shown) >= max(node.score for node in others)

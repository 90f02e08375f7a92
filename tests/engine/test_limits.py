"""Stops: what they see in a tree, and what the loop makes of them."""

from dataclasses import replace

import pytest

from beamwright.config import Settings
from beamwright.engine.decisions import (
    StopRule,
    check_stops,
    note_answers,
    num_generated,
    vote_is_settled,
)
from beamwright.errors import InputError
from beamwright.search import make_strategy
from beamwright.search.reading import Mathematics
from beamwright.sections import SearchSettings, StopSettings
from beamwright.solver.describe import final_nodes
from beamwright.tree import NodeState, StopReason, tree_hash
from beamwright.units import parse_duration
from fakes import Grouping, ScriptedExecutor, add_step, new_tree
from played import Loop, new_run

EOS, GOES_ON = StopReason.EOS, StopReason.DELIMITER


class Clock:
    """Moves on by `tick` seconds with every piece of work."""

    def __init__(self, tick=1.0):
        self.now, self.tick = 100.0, tick

    def __call__(self):
        return self.now


class TimedExecutor(ScriptedExecutor):
    """text: of every path, whatever its steps."""

    def __init__(self, script, clock, text=None):
        super().__init__(script)
        self.clock, self.text = clock, text

    def _step(self, node):
        decoded = super()._step(node)
        return replace(decoded, text=self.text or decoded.text)

    def wait(self):
        if self.queue or self.unscored:
            self.clock.now += self.clock.tick
        return super().wait()


def run(
    script,
    schedule=None,
    clock=None,
    trees=None,
    save=None,
    text=None,
    n=8,
    width=4,
    search=None,
    on_round=None,
    **stops,
):
    """Run searches with stops; returns the executor and the trees."""
    clock = clock or Clock()
    executor = TimedExecutor(script, clock, text)
    search = SearchSettings(n=n, width=width, max_rounds=9, **(search or {}))
    loop = Loop(executor, make_strategy(search), schedule, clock=clock)
    rules = trees or {new_tree(): StopSettings(**stops)}
    runs = [new_run(tree, rule=StopRule(s, search), save=save) for tree, s in rules.items()]
    loop.run(runs, on_round)
    return executor, [each.tree for each in runs]


def endless(node):
    return GOES_ON, 1 / (1 + node.lineage[-1])


def first_ends(node):
    """The first child of every node ends its path."""
    return (EOS if node.lineage[-1] == 0 else GOES_ON), node.depth / 10


def ended(texts, scores=None, stop=EOS):
    """Candidates that state these answers."""
    tree = new_tree()
    nodes = tree.expand(tree.root, len(texts))
    for node, text, score in zip(nodes, texts, scores or [0.5] * len(texts), strict=True):
        add_step(tree, node, f"The answer is {text}." if text else "hm", stop=stop)
        node.score = score
    note_answers(Mathematics(), nodes)
    return nodes


# --- votes and scores ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "scores", "remaining", "settled"),
    [
        (["1", "1", "1"], None, 2, True),
        (["1", "1", "1"], None, 3, False),  # it could be a draw
        (["1", "1", "2"], None, 0, True),
        (["1", "1", "2"], None, 1, False),
        (["1", "1.0", "$1$", "2"], None, 1, True),  # one answer, written differently
        (["1", "2"], None, 0, False),
        (["", ""], None, 0, False),
        ([], None, 4, False),
        (["1", "1", "2"], [0.9, 0.8, 0.6], 1, True),
        (["1", "1", "2"], [0.9, 0.8, 0.7], 1, False),  # another 1.0 for it would draw level
        (["1", "2", "2"], [0.9, 0.2, 0.2], 0, True),
        (["1", "1.0"], [0.9, 0.9], 1, True),
        (["1", "1"], [0.9, 0.9], 2, False),  # two of 1.0 for a third answer
        (["1", "1"], [None, None], 0, False),
        (["1", "1", "2"], [1.0, None, 0.3], 0, True),
        ([], [], 3, False),
    ],
)
def test_a_vote_is_settled_when_nobody_can_draw_level(answers, scores, remaining, settled):
    """Where scores are summed, those that remain may be ones."""
    nodes, weighted = ended(answers, scores), scores is not None
    assert vote_is_settled(nodes, remaining, weighted=weighted) is settled


def test_only_paths_that_ended_by_themselves_vote():
    cut = ended(["1", "1", "1"], stop=StopReason.PATH_LIMIT)
    assert not vote_is_settled(cut, 0)


# --- in the loop -----------------------------------------------------------------------------


def test_without_stops_the_tree_is_the_same():
    plain = run(first_ends)[1][0]
    ample = {"deadline": "1h", "token_budget": 10**9, "stop_votes": True}
    assert tree_hash(run(first_ends, **ample)[1][0]) == tree_hash(plain)
    assert plain.reason_fewer is None


@pytest.mark.parametrize(
    ("stops", "rounds", "reason"),
    [
        ({"token_budget": 16}, 1, "when --token-budget 16 was spent"),
        ({"token_budget": 17}, 2, "when --token-budget 17 was spent"),
        ({"deadline": 4}, 2, "when --deadline 4s had passed"),  # decode + verify: 2 s a round
        ({"deadline": "5s"}, 3, "when --deadline 5s had passed"),
    ],
)
def test_a_budget_ends_the_search_between_rounds(stops, rounds, reason):
    executor, (tree,) = run(endless, **stops)
    assert tree.rounds == rounds
    assert tree.reason_fewer == f"8 of 8 paths were unfinished {reason}"
    assert len(final_nodes(tree, 8)) == 8
    assert all(node.state is NodeState.CANDIDATE for node in final_nodes(tree, 8))
    assert set(executor.released) == set(tree.nodes())


def test_a_settled_vote_ends_the_search():
    def script(node):
        return (EOS if node.lineage[-1] < 5 else GOES_ON), 0.5

    _, (tree,) = run(script, text="The answer is 7.", stop_votes=True)
    reason = "3 of 8 paths were unfinished when the vote was settled (--stop-votes)"
    assert tree.reason_fewer == reason
    assert (tree.rounds, len(tree.finished())) == (1, 5)


@pytest.mark.parametrize(("score", "rounds"), [(0.9, 1), (0.5, 9)])
def test_a_weighted_vote_is_settled_by_scores(score, rounds):
    """Five of eight agree: 4.5 is out of reach of three, 2.5 is not."""

    def script(node):
        return (EOS if node.depth == 1 and node.lineage[-1] < 5 else GOES_ON), score

    votes = {"text": "The answer is 7.", "stop_votes": True}
    _, (tree,) = run(script, search={"choose": "weighted"}, **votes)
    assert (tree.rounds, len(tree.finished())) == (rounds, 5)
    assert run(script, search={"choose": "majority"}, **votes)[1][0].rounds == 1


# --- within a round --------------------------------------------------------------------------


def test_a_deadline_strikes_between_groups():
    saved = []
    executor, (tree,) = run(
        endless, Grouping(2), deadline=2, save=lambda run, s: saved.append(run.tree.rounds)
    )
    assert [len(group) for group in executor.groups] == [2, 2]
    assert [len(nodes) for nodes in executor.scored] == [4], "what was decoded is scored"
    assert tree.reason_fewer == "8 of 8 paths were unfinished when --deadline 2s had passed"
    assert len(final_nodes(tree, 8)) == 4
    assert saved == [0], "half a round is not a place to resume from"
    assert set(executor.released) == set(tree.nodes())


def test_paths_that_did_not_get_their_turn_end_a_step_earlier():
    executor, (tree,) = run(endless, Grouping(4), deadline=4)  # 2 groups and a verification
    assert [len(group) for group in executor.groups] == [4, 4, 4]
    final = final_nodes(tree, 8)
    assert [(node.depth, node.state) for node in final] == [
        *[(2, NodeState.CANDIDATE)] * 4,
        (1, NodeState.KEPT),
    ]
    assert all(node.score is not None for node in final)
    assert tree.rounds == 2


@pytest.mark.parametrize("deadline", range(1, 14))
def test_a_deadline_within_a_rollout_ends_the_search(deadline):
    """A rollout that is cut off is not waited for."""

    def stuck(report):
        assert report.round < 20

    executor, (tree,) = run(
        endless, Grouping(2), search={"search": "lookahead"}, on_round=stuck, deadline=deadline
    )
    assert (
        tree.reason_fewer == f"8 of 8 paths were unfinished when --deadline {deadline}s had passed"
    )
    final = final_nodes(tree, 8)
    assert final
    assert not any(node.greedy for node in final)
    assert set(executor.released) == set(tree.nodes())


MCTS = {"search": "mcts", "nodes": 400}


@pytest.mark.parametrize("deadline", range(1, 30, 2))
@pytest.mark.parametrize("size", [1, 3, None])
@pytest.mark.parametrize("script", [endless, first_ends])
def test_candidates_that_wait_take_no_more_places_than_there_are(deadline, size, script):
    executor, (tree,) = run(script, Grouping(size), search=MCTS, width=2, deadline=deadline)
    final = final_nodes(tree, 8)
    assert 1 <= len(final) <= 8
    if tree.rounds > 1:
        assert len(final) == 8
    assert set(executor.released) == set(tree.nodes())
    left = 8 - len(tree.finished())
    why = f"{left} of 8 paths were unfinished when --deadline {deadline}s had passed"
    assert tree.reason_fewer == (why if left else None)


def test_one_trees_deadline_does_not_stop_another():
    late, other = new_tree(0), new_tree(1)
    stops = {late: StopSettings(deadline=1), other: StopSettings(token_budget=64)}
    run(endless, Grouping(2), trees=stops)
    assert (late.rounds, num_generated(late)) == (1, 4)
    alone = run(endless, trees={new_tree(1): StopSettings(token_budget=64)})[1][0]
    assert tree_hash(other) == tree_hash(alone)
    assert len(final_nodes(other, 8)) == 8


# --- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("30s", 30), ("2m", 120), ("1h", 3600), ("0.5 s", 0.5), (3, 3)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds
    assert Settings.build(deadline=text).stop.deadline == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "-3s", "3d", "1e3", "0s", 10**400, -(10**400)])
def test_bad_durations(text):
    with pytest.raises(InputError, match="duration"):
        parse_duration(text)
    with pytest.raises(InputError, match="--deadline"):
        Settings.build(deadline=text)


@pytest.mark.parametrize(
    ("how", "probabilities", "complaint"),
    [
        ("majority", False, None),
        ("weighted", None, None),
        ("weighted", True, None),
        ("weighted", False, "--choose weighted needs a verifier .* use --choose majority"),
        ("best", None, "--stop-votes goes with --choose majority or weighted, not best"),
        ("best", True, "--stop-votes goes with --choose majority or weighted, not best"),
    ],
)
def test_votes_are_settled_only_where_they_decide(how, probabilities, complaint):
    search = SearchSettings(choose=how)
    check_stops(StopSettings(), search, probabilities=probabilities)
    votes = StopSettings(stop_votes=True)
    if complaint is None:
        check_stops(votes, search, probabilities=probabilities)
        return
    with pytest.raises(InputError, match=complaint):
        check_stops(votes, search, probabilities=probabilities)


@pytest.mark.parametrize("bad", [{"token_budget": 0}, {"deadline": 0}])
def test_bad_stops(bad):
    (name,) = bad
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')}"):
        Settings.build(**bad)

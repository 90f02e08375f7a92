"""Stops: what they see in a tree, and what the loop makes of them."""

from dataclasses import replace
from functools import partial

import pytest

from beamwright.config import SearchSettings, Settings, StopSettings, parse_duration
from beamwright.errors import InputError
from beamwright.runtime import Accounting, SearchLoop, TreeRun
from beamwright.runtime.limits import StopRule, num_generated, reaches, vote_is_settled
from beamwright.schedule import InGpuSchedule
from beamwright.search import make_strategy
from beamwright.solution import final_nodes
from beamwright.tree import NodeState, StopReason, tree_hash
from beamwright.verify import aggregate
from fakes import Grouping, ScriptedExecutor, add_step, new_tree

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

    def _run(self, work):
        self.clock.now += self.clock.tick
        return super()._run(work)


def run(script, schedule=None, clock=None, trees=None, save=None, text=None, n=8, width=4, **stops):
    """Run searches with stops; returns the executor and the trees."""
    clock = clock or Clock()
    executor = TimedExecutor(script, clock, text)
    search = SearchSettings(n=n, width=width, max_rounds=9)
    loop = SearchLoop(
        executor,
        schedule or InGpuSchedule(),
        make_strategy(search),
        partial(aggregate, how="last"),
        Accounting(clock),
        clock,
    )
    rules = trees or {new_tree(): StopSettings(**stops)}
    runs = [TreeRun(tree, rule=StopRule(s, n), save=save) for tree, s in rules.items()]
    loop.run(runs)
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
    return nodes


# --- votes and scores ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "remaining", "settled"),
    [
        (["1", "1", "1"], 2, True),
        (["1", "1", "1"], 3, False),  # it could be a draw
        (["1", "1", "2"], 0, True),
        (["1", "1", "2"], 1, False),
        (["1", "1.0", "$1$", "2"], 1, True),  # one answer, written differently
        (["1", "2"], 0, False),
        (["", ""], 0, False),
        ([], 4, False),
    ],
)
def test_a_vote_is_settled_when_nobody_can_draw_level(answers, remaining, settled):
    assert vote_is_settled(ended(answers), remaining) is settled


def test_only_paths_that_ended_by_themselves_vote_or_reach_a_score():
    cut = ended(["1", "1", "1"], stop=StopReason.PATH_LIMIT)
    assert not vote_is_settled(cut, 0)
    assert not reaches(cut, 0.1)


def test_a_score_is_reached_from_its_value_on():
    nodes = ended(["1", "2"], scores=[0.25, None])
    assert reaches(nodes, 0.25)
    assert not reaches(nodes, 0.2500001)


def test_pruned_tokens_were_generated_too():
    _, (tree,) = run(endless, token_budget=17)
    assert num_generated(tree) == 2 * sum(1 for node in tree.nodes() if node.parent)


# --- in the loop -----------------------------------------------------------------------------


def test_without_stops_the_tree_is_the_same():
    plain = run(first_ends)[1][0]
    ample = {"deadline": "1h", "token_budget": 10**9, "stop_score": 2.0, "stop_votes": True}
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
    assert len(final_nodes(tree)) == 8
    assert all(node.state is NodeState.CANDIDATE for node in final_nodes(tree))
    assert set(executor.released) == set(tree.nodes())


def test_a_score_ends_the_search_and_the_ended_path_is_finished():
    _, (tree,) = run(first_ends, stop_score=0.2)
    assert tree.rounds == 2
    assert tree.reason_fewer.endswith("paths were unfinished when a candidate had reached "
                                      "--stop-score 0.2")  # fmt: skip
    assert {node.score for node in tree.finished()} == {0.1, 0.2}
    assert len(final_nodes(tree)) == 8


def test_a_settled_vote_ends_the_search():
    def script(node):
        return (EOS if node.lineage[-1] < 5 else GOES_ON), 0.5

    _, (tree,) = run(script, text="The answer is 7.", stop_votes=True)
    reason = "3 of 8 paths were unfinished when the vote was settled (--stop-votes)"
    assert tree.reason_fewer == reason
    assert (tree.rounds, len(tree.finished())) == (1, 5)


def test_a_natural_end_needs_no_reason():
    _, (tree,) = run(lambda node: (EOS, 0.9), stop_score=0.5, token_budget=1, deadline=0.5)
    assert tree.reason_fewer is None
    assert len(tree.finished()) == 8


# --- within a round --------------------------------------------------------------------------


def test_a_deadline_strikes_between_groups():
    saved = []
    executor, (tree,) = run(
        endless, Grouping(2), deadline=2, save=lambda run, s: saved.append(run.tree.rounds)
    )
    assert [len(group) for group in executor.groups] == [2, 2]
    assert [len(nodes) for nodes in executor.scored] == [4], "what was decoded is scored"
    assert tree.reason_fewer == "8 of 8 paths were unfinished when --deadline 2s had passed"
    assert len(final_nodes(tree)) == 4
    assert saved == [0], "half a round is not a place to resume from"
    assert set(executor.released) == set(tree.nodes())


def test_paths_that_did_not_get_their_turn_end_a_step_earlier():
    executor, (tree,) = run(endless, Grouping(4), deadline=4)  # 2 groups and a verification
    assert [len(group) for group in executor.groups] == [4, 4, 4]
    final = final_nodes(tree)
    assert [(node.depth, node.state) for node in final] == [
        *[(2, NodeState.CANDIDATE)] * 4,
        (1, NodeState.KEPT),
    ]
    assert all(node.score is not None for node in final)
    assert tree.rounds == 2


def test_there_is_always_something_to_return():
    executor, (tree,) = run(endless, Grouping(1), deadline=0.001)
    assert [len(group) for group in executor.groups] == [1]
    assert len(final_nodes(tree)) == 1


def test_one_trees_deadline_does_not_stop_another():
    late, other = new_tree(0), new_tree(1)
    stops = {late: StopSettings(deadline=1), other: StopSettings(token_budget=64)}
    run(endless, Grouping(2), trees=stops)
    assert (late.rounds, num_generated(late)) == (1, 4)
    alone = run(endless, trees={new_tree(1): StopSettings(token_budget=64)})[1][0]
    assert tree_hash(other) == tree_hash(alone)
    assert len(final_nodes(other)) == 8


# --- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("30s", 30), ("2m", 120), ("1h", 3600), ("0.5 s", 0.5), (3, 3)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds
    assert Settings.build(deadline=text).stop.deadline == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "-3s", "3d", "1e3", "0s"])
def test_bad_durations(text):
    with pytest.raises(InputError, match="duration"):
        parse_duration(text)
    with pytest.raises(InputError, match="--deadline"):
        Settings.build(deadline=text)


@pytest.mark.parametrize("bad", [{"token_budget": 0}, {"stop_score": float("nan")}])
def test_bad_stops(bad):
    (name,) = bad
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')}"):
        Settings.build(**bad)

"""How searches end: budgets, votes, what stands and what is missing. The real loop, scripted."""

from contextlib import suppress

import pytest

from beamwright.config import Settings
from beamwright.engine.decisions import (
    StopRule,
    check_stops,
    num_generated,
    store_answers,
    vote_is_settled,
)
from beamwright.errors import InputError
from beamwright.protocols import StepDecoded
from beamwright.search import make_strategy
from beamwright.search.answers import Mathematics
from beamwright.search.choose import choose
from beamwright.search.defaults import with_defaults
from beamwright.sections import SearchSettings, StopSettings
from beamwright.solver.solution_maker import candidate_of, complete_nodes, final_nodes
from beamwright.tree import NodeState, StopReason, tree_hash
from beamwright.units import parse_duration
from fakes import Grouping, ScriptedExecutor, add_step, new_tree
from played import Loop, new_run

EOS, GOES_ON = StopReason.EOS, StopReason.DELIMITER


class Timed(ScriptedExecutor):
    """Every piece of work takes a second. script: node -> (stop, score[, text of the step])."""

    now = 100.0

    def clock(self):
        return self.now

    def _step(self, node):
        stop, _, *text = self.script(node)
        text = "".join(text) or f"[{node.lineage[-1]}]"
        return StepDecoded(node, (node.depth, 9), (-0.1, -0.2), stop, node.text + text)

    def wait(self):
        self.now += bool(self.queue or self.unscored)
        return super().wait()


def search_all(script, rules, schedule=None, save=None, on_round=None, **settings):
    """Grow trees, each with its own stops; returns the executor and the settings."""
    asked = Settings(search=SearchSettings(**{"n": 8, "max_rounds": 9, **settings}))
    executor, search = Timed(script), with_defaults(asked).search
    loop = Loop(
        executor,
        make_strategy(search),
        schedule or Grouping(),
        clock=executor.clock,
        render_turn=lambda node, turn: (1, 2),
    )
    runs = [new_run(t, rule=StopRule(stop, search), save=save) for t, stop in rules.items()]
    with suppress(KeyboardInterrupt):
        loop.run(runs, on_round)
    for tree in rules:
        assert set(tree.nodes()) <= set(executor.released)
    return executor, search


def run(script, schedule=None, *, deadline=None, token_budget=None, stop_votes=False, **options):
    """The executor, the tree and the settings of one search."""
    stop = StopSettings(deadline=deadline, token_budget=token_budget, stop_votes=stop_votes)
    tree = new_tree()
    executor, search = search_all(script, {tree: stop}, schedule, **options)
    return executor, tree, search


def endless(node):
    return GOES_ON, 1 / (1 + node.lineage[-1])


def first_ends(node):
    """The first child of every node ends its path."""
    return (EOS if node.lineage[-1] == 0 else GOES_ON), node.depth / 10


def box(answer):
    return rf"\boxed{{{answer}}}"


def broken_off(after):
    """A callback that ends the search after this round."""

    def on_round(report):
        if report.round == after:
            raise KeyboardInterrupt

    return on_round


def listed(tree, search):
    """Candidates as (answer, score, stop), and the chosen answer."""
    nodes = final_nodes(tree, search.n)
    store_answers(Mathematics(), nodes)
    found = [candidate_of(node) for node in nodes]
    complete = [each.stop == "eos" for each in found]
    votes, scores = [each.vote for each in found], [each.score for each in found]
    best = choose(votes, scores, complete, search.choose)
    return [(each.answer, each.score, each.stop) for each in found], found[best].answer


# --- votes -----------------------------------------------------------------------------------


def ended(texts, scores=None, stop=EOS):
    """Candidates that state these answers."""
    tree = new_tree()
    nodes = tree.expand(tree.root, len(texts))
    for node, text, score in zip(nodes, texts, scores or [0.5] * len(texts), strict=True):
        add_step(tree, node, f"The answer is {text}." if text else "hm", stop=stop)
        node.score = score
    store_answers(Mathematics(), nodes)
    return nodes


@pytest.mark.parametrize(
    ("answers", "scores", "remaining", "settled"),
    [
        (["1", "1", "1"], None, 2, True),
        (["1", "1", "1"], None, 3, False),  # it could be a draw
        (["1", "1", "2"], None, 1, False),
        (["1", "1.0", "$1$", "2"], None, 1, True),  # one answer, written differently
        (["", ""], None, 0, False),
        ([], None, 4, False),
        (["1", "1", "2"], [0.9, 0.8, 0.6], 1, True),
        (["1", "1", "2"], [0.9, 0.8, 0.7], 1, False),  # another 1.0 for it would draw level
        (["1", "1.0"], [0.9, 0.9], 1, True),
        (["1", "1"], [0.9, 0.9], 2, False),  # two of 1.0 for a third answer
        (["1", "1", "2"], [1.0, None, 0.3], 0, True),
    ],
)
def test_a_vote_is_settled_when_nobody_can_draw_level(answers, scores, remaining, settled):
    """Where scores are summed, those that remain may be ones."""
    nodes, weighted = ended(answers, scores), scores is not None
    assert vote_is_settled(nodes, remaining, weighted=weighted) is settled


def test_only_paths_that_ended_by_themselves_vote():
    cut = ended(["1", "1", "1"], stop=StopReason.PATH_LIMIT)
    assert not vote_is_settled(cut, 0)


@pytest.mark.parametrize("choose_by", ["majority", "weighted"])
@pytest.mark.parametrize("score", [0.9, 0.5])
def test_a_settled_vote_ends_the_search(choose_by, score):
    """Five of eight agree: 4.5 is out of reach of three, 2.5 is not."""

    def script(node):
        stop = EOS if node.depth == 1 and node.lineage[-1] < 5 else GOES_ON
        return stop, score, "The answer is 7."

    _, tree, _ = run(script, stop_votes=True, choose=choose_by)
    settled = choose_by == "majority" or score == 0.9
    assert (tree.rounds, len(tree.finished())) == (1 if settled else 9, 5)
    why = "were unfinished when the vote was settled (--stop-votes)"
    assert tree.reason_fewer == f"3 of 8 paths {why if settled else 'reached --max-rounds'}"


@pytest.mark.parametrize(
    ("search", "probabilities", "complaint"),
    [
        ({"choose": "majority"}, False, None),
        ({"choose": "weighted"}, None, None),
        ({"choose": "weighted"}, True, None),
        ({"choose": "weighted"}, False, "--choose weighted needs a verifier .* --choose majority"),
        ({"choose": "best"}, True, "--stop-votes needs --choose majority or weighted; with best"),
        ({"search": "deepconf", "choose": "majority"}, None, "does not work with --search deepc"),
        ({"search": "revise", "choose": "majority"}, None, "does not work with --search revise"),
    ],
)
def test_votes_are_settled_only_where_they_decide(search, probabilities, complaint):
    """And where no voter may be pruned."""
    search = SearchSettings(**search)
    check_stops(StopSettings(), search, probabilities=probabilities)
    votes = StopSettings(stop_votes=True)
    if complaint is None:
        check_stops(votes, search, probabilities=probabilities)
        return
    with pytest.raises(InputError, match=complaint):
        check_stops(votes, search, probabilities=probabilities)


# --- budgets ---------------------------------------------------------------------------------


def test_without_stops_the_tree_is_the_same():
    plain = run(first_ends)[1]
    ample = {"deadline": "1h", "token_budget": 10**9, "stop_votes": True}
    assert tree_hash(run(first_ends, choose="majority", **ample)[1]) == tree_hash(plain)
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
    _, tree, _ = run(endless, **stops)
    assert tree.rounds == rounds
    assert tree.reason_fewer == f"8 of 8 paths were unfinished {reason}"
    assert [node.state for node in final_nodes(tree, 8)] == [NodeState.CANDIDATE] * 8


def test_a_deadline_strikes_between_groups():
    saved = []
    executor, tree, _ = run(
        endless, Grouping(2), deadline=2, save=lambda run, s: saved.append(run.tree.rounds)
    )
    assert [len(group) for group in executor.groups] == [2, 2]
    assert [len(nodes) for nodes in executor.scored] == [4], "what was decoded is scored"
    assert tree.reason_fewer == "8 of 8 paths were unfinished when --deadline 2s had passed"
    assert len(final_nodes(tree, 8)) == 4
    assert saved == [0], "half a round is not a place to resume from"


def test_paths_that_did_not_get_their_turn_end_a_step_earlier():
    executor, tree, _ = run(endless, Grouping(4), deadline=4)  # 2 groups and a verification
    assert [len(group) for group in executor.groups] == [4, 4, 4]
    final = final_nodes(tree, 8)
    candidates = [(2, NodeState.CANDIDATE)] * 4
    assert [(node.depth, node.state) for node in final] == [*candidates, (1, NodeState.KEPT)]
    assert all(node.score is not None for node in final)


@pytest.mark.parametrize("script", [endless, first_ends])
@pytest.mark.parametrize("size", [1, 3, None])
@pytest.mark.parametrize("search", [{"search": "mcts", "nodes": 400, "width": 2}, "lookahead"])
def test_a_deadline_at_any_time_leaves_as_many_as_there_are_places(search, size, script):
    """In the middle of a rollout, too, which is not waited for."""
    settings = {"search": search} if isinstance(search, str) else search
    for deadline in range(1, 30, 3):
        _, tree, _ = run(script, Grouping(size), deadline=deadline, **settings)
        final = final_nodes(tree, 8)
        assert 1 <= len(final) <= 8
        assert not any(node.greedy for node in final)
        assert len(final) == 8 or tree.rounds <= 1 or settings == {"search": "lookahead"}
        left = 8 - len(tree.finished())
        why = f"{left} of 8 paths were unfinished when --deadline {deadline}s had passed"
        assert tree.reason_fewer == (why if left else None)


def test_one_trees_deadline_does_not_stop_another():
    late, other, alone = new_tree(0), new_tree(1), new_tree(1)
    budget = StopSettings(token_budget=64)
    search_all(endless, {late: StopSettings(deadline=1), other: budget}, Grouping(2))
    assert (late.rounds, num_generated(late)) == (1, 4)
    search_all(endless, {alone: budget})
    assert tree_hash(other) == tree_hash(alone)
    assert len(final_nodes(other, 8)) == 8


@pytest.mark.parametrize("text", ["", "soon", "0", "-3s", "3d", "1e3", "0s", 10**400, -(10**400)])
def test_bad_durations(text):
    with pytest.raises(InputError, match="duration"):
        parse_duration(text)
    with pytest.raises(InputError, match="--deadline"):
        Settings.build(deadline=text)


# --- what stands, and who is shown -----------------------------------------------------------


def test_a_draft_that_ends_in_the_last_round_stands():
    def script(node):
        if node.lineage[1] == 0:
            return (EOS, 0.9, box(42)) if node.depth >= 3 else (GOES_ON, 0.9, "a")
        return EOS, 0.2, box(node.depth)

    found, chosen = listed(*run(script, search="revise", n=2, max_rounds=3)[1:])
    assert [stop for _, _, stop in found] == ["eos", "eos"]
    assert chosen == "42"


def test_broken_off_the_best_answer_of_every_path_stands():
    """Path 0 ends with a revision that is worse than its draft; path 1 is about to be revised."""

    def script(node):
        asked = sum(each.turn is not None for each in node.path())
        if node.lineage[1] == 1 and asked:
            return GOES_ON, 0.5, "still thinking"
        return EOS, [0.9, None, 0.1][asked], [box(42), "bad", box(0)][asked]

    _, tree, _ = run(script, on_round=broken_off(4), search="revise", n=2)
    assert [(node.text, node.score) for node in complete_nodes(tree)] == [(box(42), 0.9)] * 2


def low_votes(node):
    """Of six paths two are confident and say 5; path 5 goes on for longer."""
    path = node.lineage[1]
    stop = GOES_ON if path == 5 and node.depth <= 2 else EOS
    return stop, [1, 9, 0.5, 0.5, 0.5, 9][path], box([7, 5, 7, 7, 7, 5][path])


DEEPCONF = {"search": "deepconf", "n": 6, "warmup": 2, "keep": 0.1, "choose": "majority"}


def test_paths_below_the_bar_do_not_vote_when_a_budget_ends_the_search():
    _, tree, search = run(low_votes, **DEEPCONF)
    assert listed(tree, search) == ([("5", 9, "eos"), ("5", 9, "eos")], "5")
    _, tree, search = run(low_votes, token_budget=12, **DEEPCONF)
    found, chosen = listed(tree, search)
    assert chosen == "5"
    assert found == [("5", 9, "eos"), ("5", 9, "round_limit")]
    assert tree.reason_fewer.startswith("1 of 6 paths were unfinished when --token-budget")


def test_equal_answers_all_vote_where_paths_do_not_compete():
    def script(node):
        path = node.lineage[1]
        return (GOES_ON if path == 4 and node.depth <= 3 else EOS), None, box([3, 3, 3, 8, 8][path])

    options = {"search": "majority", "n": 5, "filter_duplicates": True}
    _, tree, search = run(script, token_budget=10, **options)
    found, chosen = listed(tree, search)
    assert [answer for answer, _, _ in found] == ["3", "3", "3", "8", "8"]
    assert chosen == "3"
    assert tree.reason_fewer == "1 of 5 paths were unfinished when --token-budget 10 was spent"


def test_of_many_unfinished_paths_the_best_scored_are_listed():
    def script(node):
        return GOES_ON, {0: 0.1, 1: 0.5, 2: 0.3, 3: 0.9}[node.lineage[-1] % 4], "x"

    _, tree, search = run(script, on_round=broken_off(2), search="mcts", n=4, width=4)
    shown = final_nodes(tree, search.n)
    others = [node for node in tree.candidates() if node not in shown]
    assert len(shown) == search.n
    assert others
    assert min(node.score for node in shown) >= max(node.score for node in others)

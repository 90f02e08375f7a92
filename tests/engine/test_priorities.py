"""Who goes first: by priority, with bounds on every wait; and that no tree depends on it."""

import random
from functools import partial

import pytest

from beamwright.engine.admission import PATIENT_ROUNDS, WAITING_ROUNDS, Fairness, PriorityQueue
from beamwright.engine.engine import Engine
from beamwright.engine.scoring import MOST_PASSED, ScoringQueue
from beamwright.engine.timeline import Accounting
from beamwright.engine.tree_run import TreeRun
from beamwright.protocols import Plan
from beamwright.search import make_strategy, round_rng
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason, tree_hash
from beamwright.verify.spec import aggregate
from fakes import Grouping, ScriptedExecutor, new_tree

EOS, GOES_ON = StopReason.EOS, StopReason.DELIMITER


def a_run(name, priority=0, n=2, rounds=6):
    search = SearchSettings(search="beam", n=n, width=2, max_rounds=rounds)
    return TreeRun(
        new_tree(name),
        make_strategy(search),
        partial(aggregate, how="last"),
        partial(round_rng, search),
        priority=priority,
    )


def script(node):
    return GOES_ON, random.Random(str(node.lineage)).random()


def an_engine(size=2, schedule=None):
    engine = Engine(ScriptedExecutor(script), schedule or Grouping(size), Accounting())
    engine.fairness = Watched()
    return engine


class Watched(Fairness):
    """Remembers the longest wait, and the most steps of a round of all trees."""

    longest = round_steps = 0

    def note(self, runs, running):
        self.round_steps = max(self.round_steps, sum(len(run.beams) for run in runs))
        super().note(runs, running)

    def decoded(self, run):
        self.longest = max(self.longest, self.waits().get(run, 0))
        super().decoded(run)


def finish(engine, runs=(), arrivals=()):
    """Run to the end, one more arriving as one ends; the order in which they end."""
    arrivals, ended = iter(arrivals), []
    for run in runs:
        engine.admit(run)
    while engine.num_live:
        for run in engine.step():
            ended.append(run.tree.root.problem_id)
            if (newcomer := next(arrivals, None)) is not None:
                engine.admit(newcomer)
    return ended


# --- decoding --------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_of_trees_in_flight_those_of_a_higher_priority_end_first(reverse):
    """Whatever the schedule makes of the order."""
    runs = [a_run(f"low {k}") for k in range(3)] + [a_run("high", priority=1)]
    assert finish(an_engine(schedule=Grouping(2, reverse)), runs)[0] == "high"


def test_a_group_is_cut_where_ranks_differ():
    fairness, runs = Fairness(), [a_run("low"), a_run("high", priority=2)]
    low, high = (run.tree.expand(run.tree.root, 2) for run in runs)
    plan = Plan(((low[0], high[0]), (low[1], high[1])), write_back=True)
    found = fairness.cut(plan, runs)
    assert found.groups == ((high[0],), (high[1],), (low[0],), (low[1],))
    assert found.write_back
    runs[1].priority = 0
    assert fairness.cut(plan, runs) is plan, "as it is where nobody is in front"


def test_a_stream_of_urgent_newcomers_does_not_keep_another_waiting():
    engine = an_engine()
    urgent = [a_run(k, priority=9, rounds=1) for k in range(400)]
    ended = finish(engine, [a_run("patient"), *urgent[:3]], urgent[3:])
    rounds, in_a_round = 6, 4 * 2
    assert ended.index("patient") <= rounds * WAITING_ROUNDS * in_a_round
    assert engine.fairness.longest <= WAITING_ROUNDS * engine.fairness.round_steps
    assert engine.fairness.longest >= PATIENT_ROUNDS * engine.fairness.round_steps - in_a_round


@pytest.mark.parametrize("seed", range(30))
def test_nobody_waits_longer_than_the_bound(seed):
    chance = random.Random(seed)
    many = [
        a_run(k, chance.choice([0, 0, 1, 5, -3]), chance.choice([2, 4, 8]), chance.randint(1, 9))
        for k in range(40)
    ]
    first = chance.randint(2, 12)
    engine = an_engine(schedule=Grouping(chance.randint(1, 9), chance.random() < 0.5))
    assert len(finish(engine, many[:first], many[first:])) == len(many)
    assert engine.fairness.longest <= WAITING_ROUNDS * engine.fairness.round_steps


def test_no_tree_depends_on_priorities():
    def trees(priorities):
        runs = [a_run(k, priority) for k, priority in enumerate(priorities)]
        finish(an_engine(3), runs)
        return [tree_hash(run.tree) for run in runs]

    assert trees([0, 0, 0, 0]) == trees([3, -1, 7, 0])


# --- lines -----------------------------------------------------------------------------------


def test_a_line_is_by_priority_then_by_who_came_first():
    line = PriorityQueue(100)
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)]:
        line.put(name, priority)
    assert [line.take() for _ in range(len(line))] == ["b", "d", "a", "c", "e"]


def test_so_many_pass_and_no_more():
    line = PriorityQueue(3)
    line.put("patient")
    for k in range(5):
        line.put(k, 1)
    assert list(line) == [0, 1, 2, "patient", 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_passed_by_more_than_a_line_allows(seed):
    chance, line, passed = random.Random(seed), PriorityQueue(4), {}
    for k in range(300):
        if chance.random() < 0.6 or not line:
            line.put(k, chance.randint(0, 3))
            passed[k] = 0
        else:
            first = line.take()
            for waiting in line:
                passed[waiting] += waiting < first
    assert max(passed.values()) <= 4


def test_who_is_removed_waits_no_more():
    line = PriorityQueue(4)
    for k in range(4):
        line.put(k)
    line.change(lambda each: None if each == 2 else each)
    assert list(line) == [0, 1, 3]


def test_a_batch_of_a_higher_priority_is_scored_first():
    queue, trees = ScoringQueue(), [new_tree(k) for k in range(MOST_PASSED + 2)]
    patient, *urgent = [tuple(tree.expand(tree.root, 1)) for tree in trees]
    queue.put(patient)
    for batch in urgent:
        queue.put(batch, 1)
    taken = [queue.take() for _ in trees]
    assert taken == [*urgent[:MOST_PASSED], patient, *urgent[MOST_PASSED:]]

"""Who goes first: by priority, then who was served least; and that no tree depends on it."""

import random
from functools import partial

import pytest

from beamwright.engine.engine import Engine
from beamwright.engine.queue import cut_by_priority
from beamwright.engine.scoring import PriorityQueue, ScoringQueue
from beamwright.engine.timeline import Accounting
from beamwright.engine.tree_run import TreeRun
from beamwright.protocols import Plan
from beamwright.search import make_strategy, round_rng
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason
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
    return Engine(ScriptedExecutor(script), schedule or Grouping(size), Accounting())


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


def test_a_group_is_cut_where_priorities_differ():
    runs = [a_run("low"), a_run("high", priority=2)]
    low, high = (run.tree.expand(run.tree.root, 2) for run in runs)
    plan = Plan(((low[0], high[0]), (low[1], high[1])), write_back=True)
    found = cut_by_priority(plan, runs)
    assert found.groups == ((high[0],), (high[1],), (low[0],), (low[1],))
    assert found.write_back
    runs[1].priority = 0
    assert cut_by_priority(plan, runs) is plan, "as it is where nobody is in front"


def test_a_stream_of_newcomers_does_not_keep_another_of_their_priority_waiting():
    newcomers = [a_run(k, rounds=1) for k in range(100)]
    ended = finish(an_engine(), [a_run("patient"), *newcomers[:3]], newcomers[3:])
    assert ended.index("patient") <= 6 * 4 * 2


# --- lines -----------------------------------------------------------------------------------


def test_a_line_is_by_priority_then_by_who_came_first():
    line = PriorityQueue()
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)]:
        line.put(name, priority)
    assert [line.take() for _ in range(len(line))] == ["b", "d", "a", "c", "e"]


def test_a_batch_of_a_higher_priority_is_scored_first():
    queue, trees = ScoringQueue(), [new_tree(k) for k in range(4)]
    first, *urgent = [tuple(tree.expand(tree.root, 1)) for tree in trees]
    queue.put(first)
    for batch in urgent:
        queue.put(batch, 1)
    assert [queue.take() for _ in trees] == [*urgent, first]

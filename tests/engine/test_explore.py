"""How several problems share the device: who waits for whom, and that no tree depends on it."""

import random
from types import SimpleNamespace

import pytest

from beamwright import Solver
from beamwright.counters import Counters
from beamwright.engine.admission import USUAL_ROWS, TreeAdmission
from beamwright.engine.scoring import ScoringQueue
from beamwright.evaluate.problems import load_problems
from beamwright.search import make_strategy
from beamwright.sections import ScheduleSettings, SearchSettings
from beamwright.tree import StopReason
from engines import assert_nothing_allocated, exact_dtype
from fakes import Grouping, ScriptedExecutor, new_tree
from played import Loop, new_run

PROBLEMS = [f"Ann has {k} apples. She eats {k % 3}." for k in range(6)]
FAST = {"search": "beam", "n": 4, "width": 2, "max_rounds": 4, "max_step_tokens": 12}


@pytest.mark.parametrize("search", ["best-of-n", "beam"])
def test_a_path_that_waits_for_no_other_goes_on_before_its_round_is_over(search):
    """Decoupled exploration, Alg. 5; the trees are those that each grows by rounds."""
    problems = [each.problem for each in load_problems("bundled:test", 2).problems]
    options = {"model": "bundled", "verifier": "bundled", "search": search, "n": 4, "width": 2}
    hashes, ahead = [], []
    for explore in ("continuous", "decoupled"):
        with Solver(**options, dtype=exact_dtype(), max_rounds=5, explore=explore) as solver:
            solved = [each for _, each in sorted(solver.solve_many(problems, in_flight=2))]
            assert_nothing_allocated(solver)
        hashes.append([each.tree_hash for each in solved])
        ahead.append([each.tokens.speculated_kept for each in solved])
    assert hashes[0] == hashes[1]
    assert any(ahead[1]) or search == "beam"


def admission(explore="continuous", in_flight=None, room=2**20, host=None, **settings):
    """host: bytes of a host tier, whose clock stands at `ticks`."""
    budget = SimpleNamespace(
        bytes_per_token=10,
        budget=SimpleNamespace(total_bytes=room),
        bytes_per_block=80,
        groups=[SimpleNamespace(state_blocks=0)],
    )
    tier = None
    if host is not None:
        ledger = SimpleNamespace(budget=SimpleNamespace(total_bytes=host))
        tier = SimpleNamespace(ledger=ledger, recompute=False)
    store = SimpleNamespace(device=budget, counts=Counters(), host=tier)
    asked = ScheduleSettings(explore=explore, **settings)
    made = TreeAdmission(asked, in_flight, [store] * asked.verifiers)
    made.ticks = 0.0
    made.clock = lambda: made.ticks
    return made


class Run:
    """A tree whose last round needs KV of so many tokens."""

    def __init__(self, tokens=0):
        self.round_tokens = [tokens]


def taken_in(options, looks, **happened):
    """Whether there is a place, one look after another.

    looks: (sizes of the trees in flight, tokens of each one's round, open steps). happened: what
    is counted between the first look and the second.
    """
    each, found = admission(**options), []
    for sizes, tokens, num_open in looks:
        if found:
            each.ticks = 10.0
            vars(each.stores[0].counts).update(happened)
        found.append(each.has_room({Run(tokens): size for size in sizes}, num_open))
    return found


DECOUPLED = {"explore": "decoupled"}


@pytest.mark.parametrize(
    ("options", "looks", "found", "happened"),
    [
        ({}, [([], 0, 0), ([16] * 3, 0, 0)], [True, True], {}),
        ({}, [([16] * 4, 0, 0), ([USUAL_ROWS], 0, 0)], [False, False], {}),
        # How large a tree becomes is known when one has ended.
        (
            {**DECOUPLED, "max_batch": 90},
            [([16] * 6, 0, open_steps) for open_steps in (80, 80, 96)],
            [False, True, False],
            {},
        ),
        # A tree is one verifier's, and each of them has a part of the room.
        *(
            (
                {**DECOUPLED, "room": room // verifiers, "verifiers": verifiers},
                [([16], 20, 8), ([16] * 4, 10, 8)],
                [True, place],
                {},
            )
            for verifiers in (1, 2)
            for room, place in ((1000, True), (999, False))
        ),
        # Whether they fit is asked only where nobody has said how many.
        *(
            ({**DECOUPLED, "in_flight": count, "room": 1}, [([16] * 4, 10, 8)], [place], {})
            for count, place in ((None, False), (5, True), (4, False))
        ),
        # None while KV has to leave.
        (
            DECOUPLED,
            [([16], 0, 8), ([16] * 4, 0, 8), ([16] * 4, 0, 8)],
            [True, False, True],
            {"evicted_blocks": 3},
        ),
        # With a host seconds of waiting count and not what has left; no more than both tiers hold.
        *(
            (
                {**DECOUPLED, "room": 1000, "host": 1000},
                [([16], 20, 8), ([16] * 4, 10, 8), ([16] * 12, 20, 8)],
                [True, place, False],
                {"evicted_blocks": 3, "transfer_wait_s": waited_s},
            )
            for waited_s, place in ((0.4, True), (0.6, False))
        ),
    ],
)
def test_decoupled_takes_problems_in_until_a_pass_is_full(options, looks, found, happened):
    """Else so many candidates as usual; a number of problems is taken at its word."""
    assert taken_in(options, looks, **happened) == found


def test_a_turn_of_the_verifier_takes_what_fits():
    trees = [new_tree(k) for k in range(4)]
    batches = [tuple(tree.expand(tree.root, 2)) for tree in trees]
    queue = ScoringQueue(4)
    for batch in batches:
        queue.put(batch)
    assert queue.take() == (*batches[0], *batches[1])
    queue.release(batches[2])
    assert queue.take() == batches[3]
    assert not queue
    assert queue.take() == ()


# --- priorities: who goes first, and then who was served least ------------------------------------


EOS, GOES_ON = StopReason.EOS, StopReason.DELIMITER


def script(node):
    """Newcomers, who have numbers, end soon."""
    soon = isinstance(node.problem_id, int)
    return (EOS if soon else GOES_ON), random.Random(str(node.lineage)).random()


def finish(runs, arrivals=(), schedule=None):
    """Run to the end, one more arriving as one ends; the order in which they end."""
    strategy = make_strategy(SearchSettings(search="beam", n=2, width=2, max_rounds=6))
    loop = Loop(ScriptedExecutor(script), strategy, schedule or Grouping(2))
    loop.prepare([*runs, *arrivals])
    arrivals, ended = iter(arrivals), []
    for run in runs:
        loop.engine.admit(run)
    while loop.engine.num_live:
        for run in loop.engine.step():
            ended.append(run.tree.root.problem_id)
            if (newcomer := next(arrivals, None)) is not None:
                loop.engine.admit(newcomer)
    return ended


@pytest.mark.parametrize("reverse", [False, True])
def test_of_trees_in_flight_those_of_a_higher_priority_end_first(reverse):
    """Whatever the schedule makes of the order."""
    runs = [new_run(new_tree(f"low {k}")) for k in range(3)]
    runs.append(new_run(new_tree("high"), priority=1))
    assert finish(runs, schedule=Grouping(2, reverse))[0] == "high"


def test_a_stream_of_newcomers_does_not_keep_another_of_their_priority_waiting():
    patient, *newcomers = [new_run(new_tree(name)) for name in ("patient", *range(100))]
    ended = finish([patient, *newcomers[:3]], newcomers[3:])
    assert ended.index("patient") <= 6 * 4 * 2


def test_a_batch_of_a_higher_priority_is_scored_first():
    queue, trees = ScoringQueue(), [new_tree(k) for k in range(4)]
    first, *urgent = [tuple(tree.expand(tree.root, 1)) for tree in trees]
    queue.put(first)
    for batch in urgent:
        queue.put(batch, 1)
    assert [queue.take() for _ in trees] == [*urgent, first]

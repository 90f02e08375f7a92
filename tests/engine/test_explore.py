"""How several problems share the device: who waits for whom, and that no tree depends on it."""

from types import SimpleNamespace

import pytest

from beamwright import Solver
from beamwright.counters import Counters
from beamwright.engine.engine import Engine
from beamwright.engine.queue import USUAL_ROWS, Admission
from beamwright.engine.scoring import Scoring, ScoringQueue
from beamwright.engine.timeline import Accounting
from beamwright.errors import CapacityError, InputError
from beamwright.evaluate.problems import load_problems
from beamwright.protocols import StepFailed, StepScored
from beamwright.sections import ScheduleSettings
from engines import assert_nothing_allocated, exact_dtype
from fakes import new_tree

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


def test_in_lockstep_nobody_decides_before_all_are_scored(make_solver, monkeypatch):
    decide, seen = Engine._select, []

    def noted(engine, run):
        if run.tree.rounds:
            seen.append((len(seen), len(engine._live), run.tree.rounds))
            assert all(not other.open or other.tree.rounds > 0 for other in engine._live.values())
        decide(engine, run)

    monkeypatch.setattr(Engine, "_select", noted)
    with make_solver(**FAST, explore="lockstep") as solver:
        solver.solve_many(PROBLEMS[:3])
    rounds = [number for _, _, number in seen]
    assert rounds == sorted(rounds), "all of a round before any of the next"


def admission(explore="continuous", in_flight=None, room=2**20, host=None, fixed=0, **settings):
    """host: bytes of a host tier, whose clock stands at `ticks`. fixed: blocks of a row's state."""
    budget = SimpleNamespace(
        bytes_per_token=10,
        budget=SimpleNamespace(total_bytes=room),
        bytes_per_block=80,
        groups=[SimpleNamespace(fixed=0), SimpleNamespace(fixed=fixed)],
    )
    tier = None
    if host is not None:
        ledger = SimpleNamespace(budget=SimpleNamespace(total_bytes=host))
        tier = SimpleNamespace(ledger=ledger, recompute=False)
    store = SimpleNamespace(device=budget, counts=Counters(), host=tier)
    asked = ScheduleSettings(explore=explore, **settings)
    made = Admission(asked, in_flight, [store] * asked.verifiers)
    made.ticks = 0.0
    made.clock = lambda: made.ticks
    return made


class Run:
    """A tree whose last round needs KV of so many tokens."""

    def __init__(self, tokens=0):
        self.round_tokens = [tokens]


def live(sizes, tokens=0):
    return {Run(tokens): size for size in sizes}


@pytest.mark.parametrize(
    ("sizes", "place"), [([], True), ([16] * 3, True), ([16] * 4, False), ([USUAL_ROWS], False)]
)
def test_as_usual_so_many_candidates_are_in_flight(sizes, place):
    assert admission().has_place(live(sizes), 0) is place


def test_decoupled_takes_problems_in_until_a_pass_is_full():
    each = admission("decoupled", max_batch=90)
    assert not each.has_place(live([16] * 6), 80), "how large a tree becomes is not known"
    assert each.has_place(live([16] * 6), 80), "one has ended"
    assert not each.has_place(live([16] * 6), 96)


@pytest.mark.parametrize("verifiers", [1, 2])
def test_decoupled_takes_in_what_fits(verifiers):
    """A tree is one verifier's, and each of them has a part of the room."""
    for room, place in ((1000, True), (999, False)):
        each = admission("decoupled", room=room // verifiers, verifiers=verifiers)
        each.has_place(live([16], tokens=20), 8)
        assert each.has_place(live([16] * 4, tokens=10), 8) is place


def test_a_number_of_problems_is_taken_at_its_word():
    """Whether they fit is asked only where nobody has said how many."""
    for in_flight, place in ((None, False), (5, True), (4, False)):
        each = admission("decoupled", in_flight=in_flight, room=1)
        assert each.has_place(live([16] * 4, tokens=10), 8) is place


def test_nobody_comes_in_the_place_of_a_tree_while_kv_has_to_leave():
    each = admission("decoupled")
    each.has_place(live([16]), 8)
    each.stores[0].counts.evicted_blocks = 3
    assert not each.has_place(live([16] * 4), 8)
    assert each.has_place(live([16] * 4), 8), "another has ended, and nothing has left since"


@pytest.mark.parametrize(("waited_s", "place"), [(0.4, True), (0.6, False)])
def test_with_a_host_seconds_of_waiting_count_and_not_what_has_left(waited_s, place):
    """What does not fit the device may still be cheaper than rows that stay empty."""
    each = admission("decoupled", room=1000, host=1000)
    each.has_place(live([16], tokens=20), 8)
    each.ticks, counts = 10.0, each.stores[0].counts
    counts.evicted_blocks, counts.transfer_wait_s = 3, waited_s
    assert each.has_place(live([16] * 4, tokens=10), 8) is place
    assert not each.has_place(live([16] * 12, tokens=20), 8), "nor more than both tiers hold"


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


class Scorer:
    """Scores 1, but for trees that it cannot score, and so many at a time."""

    default_aggregate, probabilities, beside_decoding = "last", False, False

    def __init__(self, bad=(), most=8, error=None):
        self.bad, self.most, self.calls = bad, most, []
        self.error = error or InputError("no")

    def score(self, nodes):
        self.calls.append(len(nodes))
        if len(nodes) > self.most or any(node.root in self.bad for node in nodes):
            raise self.error
        return [1.0] * len(nodes)

    def release(self, nodes):
        pass


@pytest.mark.parametrize("error", [InputError("no"), CapacityError("a thing", 8, 4, 4)])
def test_what_fails_beside_others_fails_alone(error):
    trees = [new_tree(k) for k in range(3)]
    nodes = [node for tree in trees for node in tree.expand(tree.root, 2)]
    scorer = Scorer(bad=[trees[1].root], error=error)
    events = Scoring(scorer, Accounting()).score(nodes)
    failed = {event.node.root for event in events if isinstance(event, StepFailed)}
    scored = [event.node for event in events if isinstance(event, StepScored)]
    assert failed == {trees[1].root}
    assert scored == [*nodes[:2], *nodes[4:]]
    assert scorer.calls == [6, 2, 2, 2]

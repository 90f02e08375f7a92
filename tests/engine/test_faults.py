"""Faults in the middle of a search: clear errors, nothing allocated afterwards, no hang."""

import traceback

import numpy as np
import pytest

from beamwright import Solution
from beamwright.errors import BeamwrightError, CapacityError, Interrupted, LinkError
from beamwright.kv.pool import BlockLedger
from beamwright.models.dense import DenseDecoder
from beamwright.models.tree_model import TreeModel
from beamwright.verify.prm import PrmVerifier
from beamwright_lab.baselines.layerwise import streams
from engines import PROBLEM, assert_nothing_allocated, grow

SMALL = {"n": 8, "width": 4, "max_rounds": 4, "host_memory": "1MiB"}
TIGHT = {"schedule": "locality", "kv_memory": 9 * 4096, "n": 12, "host_memory": "1MiB"}
HOW = [
    {"schedule": "in-gpu"},
    {"schedule": "locality"},
    {"schedule": "locality", "kv_memory": 10 * 4096},
    {"schedule": "layerwise"},
]


PLACES = {
    "hidden": DenseDecoder,
    "logits": DenseDecoder,
    "open_session": TreeModel,
    "score": PrmVerifier,
}
"""What a search does, by the name of the method."""


class FailingLedger:
    """Stands in for `BlockLedger.allocate`: the k-th real call finds no room."""

    def __init__(self, monkeypatch):
        self.num_calls, self.fails_at, self.callers = 0, None, []
        real = BlockLedger.allocate

        def allocate(ledger, num_blocks):
            if num_blocks > 0:
                self.num_calls += 1
                self.callers.append(own_callers())
                if self.num_calls == self.fails_at:
                    raise CapacityError("an injected failure", num_blocks, 0, 0, ledger.budget.tier)
            return real(ledger, num_blocks)

        monkeypatch.setattr(BlockLedger, "allocate", allocate)

    def arm(self, call):
        self.num_calls, self.fails_at = 0, call
        self.callers.clear()

    def telling_calls(self):
        """The first, the middle and the last call from each place in the code, numbered from 1.

        Calls repeat: most of a search's allocations come from a handful of places. What differs
        between calls from one place is how much is held by then, so they are spread over the run.
        """
        places = {}
        for number, callers in enumerate(self.callers, start=1):
            places.setdefault(callers, []).append(number)
        spread = ({own[0], own[len(own) // 2], own[-1]} for own in places.values())
        return sorted(set().union(*spread))


def own_callers():
    """The chain of our functions that led here."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(None))
    return tuple(code for code in codes if "beamwright" in code.co_filename)


def attempt(solver, **options):
    """The solution and the error of a search; one of them is None."""
    try:
        return solver.solve(PROBLEM, **options), None
    except (BeamwrightError, Interrupted) as error:
        return None, error


def check_partial(error, finished):
    """What was finished before the error, no more and no less."""
    if finished:
        assert isinstance(error.partial, Solution)
        assert len(error.partial.candidates) == finished
        assert error.partial.reason_fewer
    elif isinstance(error, Interrupted) and error.partial is not None:
        assert {each.stop for each in error.partial.candidates} == {"round_limit"}
    else:
        assert error.partial is None


@pytest.mark.parametrize(
    "how", [*HOW[:2], pytest.param(HOW[2], marks=pytest.mark.nightly), HOW[3]], ids=str
)
def test_an_allocation_that_fails_anywhere(make_solver, monkeypatch, how):
    """A correct result or a clear error, whatever place in the code it is of."""
    ledger = FailingLedger(monkeypatch)
    rounds = []
    with make_solver(**{**SMALL, **how}) as solver:
        expected = grow(solver)[0].tree_hash
        ledger.arm(None)
        assert solver.solve(PROBLEM).tree_hash == expected
        assert ledger.num_calls > 4
        calls = ledger.telling_calls()
        errors = 0
        for call in calls:
            ledger.arm(call)
            rounds.clear()
            solution, error = attempt(solver, on_round=rounds.append)
            if error is None:
                assert solution.tree_hash == expected
            else:
                errors += 1
                assert isinstance(error, CapacityError)
                assert "exhausted" in str(error)
                assert "\n" not in str(error)
                finished = sum(len(report.finished) for report in rounds)
                check_partial(error, finished)
            assert_nothing_allocated(solver)
        ledger.arm(None)
        assert solver.solve(PROBLEM).tree_hash == expected
    # Most are met by asking again for less; those of a prompt or a lone row are not.
    assert errors < len(calls)


def test_a_verifier_that_finds_no_room_at_any_point(make_solver, verifier_folder, monkeypatch):
    ledger = FailingLedger(monkeypatch)
    options = {"n": 4, "max_rounds": 2, "host_memory": "1MiB", "schedule": "locality"}
    with make_solver(verifier=str(verifier_folder), **options) as solver:
        ledger.arm(None)
        expected = solver.solve(PROBLEM).tree_hash
        for call in ledger.telling_calls():
            ledger.arm(call)
            solution, error = attempt(solver)
            if error is None:
                assert solution.tree_hash == expected
            else:
                assert "injected" in str(error)
            assert_nothing_allocated(solver)


@pytest.mark.parametrize("schedule", ["locality", "layerwise"])
def test_a_copier_that_dies_in_the_middle_of_a_search(make_solver, monkeypatch, schedule):
    """The k-th copy fails, for several k: LinkError, or it did not matter; never a hang."""
    budget = {"locality": 9 * 4096, "layerwise": 200 * 4096}[schedule]
    options = {**TIGHT, "schedule": schedule, "kv_memory": budget}
    solver = make_solver(**options)
    if schedule == "layerwise":
        peak = solver.solve(PROBLEM).kv.device_peak_bytes
        solver = make_solver(**{**options, "kv_memory": peak})
        # Two layers are as many as there are stream buffers, so layers move when asked to.
        monkeypatch.setattr(streams, "resident_layers", lambda layers, free, layer: 0)
    expected = solver.solve(PROBLEM).tree_hash
    real, count, fails_at = np.copyto, [0], [0]

    def copyto(destination, source):
        count[0] += 1
        if count[0] == fails_at[0]:
            raise ValueError("the link is gone")
        real(destination, source)

    monkeypatch.setattr("beamwright.kv.streams.np.copyto", copyto)
    assert solver.solve(PROBLEM).tree_hash == expected
    num_copies = count[0]
    assert num_copies > 10
    failed = 0
    for call in (1, 2, num_copies // 3, num_copies // 2, 2 * num_copies // 3):
        count[0], fails_at[0] = 0, call
        with pytest.raises(LinkError, match=r"link failed.*the link is gone"):
            solver.solve(PROBLEM)
        failed += 1
        assert_nothing_allocated(solver)
        solver.close()
        fails_at[0] = 0
        assert solver.solve(PROBLEM).tree_hash == expected, "it works again"
    assert failed == 5
    solver.close()


def test_a_full_host_tier_is_named_and_nothing_is_left(make_solver):
    with make_solver(**{**TIGHT, "host_memory": 4096}) as solver:
        for _ in range(2):
            with pytest.raises(CapacityError, match=r"host KV budget exhausted.*--host-memory"):
                solver.solve(PROBLEM)
            assert_nothing_allocated(solver)


@pytest.mark.parametrize(
    ("how", "kind"),
    [*((how, KeyboardInterrupt) for how in HOW), (HOW[2], LinkError), (HOW[3], RuntimeError)],
    ids=str,
)
def test_an_exception_in_the_callback(make_solver, how, kind):
    with make_solver(**{**SMALL, **how}) as solver:
        expected = solver.solve(PROBLEM).tree_hash
        finished = []

        def on_round(report):
            finished.extend(report.finished)
            if finished:
                raise kind("stop")

        wanted = Interrupted if kind is KeyboardInterrupt else kind
        with pytest.raises(wanted) as caught:
            solver.solve(PROBLEM, on_round=on_round)
        if kind is not RuntimeError:
            check_partial(caught.value, len(finished))
        assert_nothing_allocated(solver)
        assert solver.solve(PROBLEM).tree_hash == expected


@pytest.mark.parametrize("call", [1, 4, 9])
@pytest.mark.parametrize("name", PLACES)
def test_ctrl_c_inside_a_round(make_solver, verifier_folder, monkeypatch, name, call):
    """In any piece of work: what is finished is kept, and the solver goes on."""
    options = {"schedule": "locality", "kv_memory": 14 * 4096, "host_memory": "1MiB", "n": 8}
    rounds, calls, owner = [], [0], PLACES[name]
    real = getattr(owner, name)

    def interrupted(self, *args, **named):
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        return real(self, *args, **named)

    with make_solver(verifier=str(verifier_folder), **options) as solver:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            _, error = attempt(solver, on_round=rounds.append)
        if calls[0] >= call:
            assert isinstance(error, Interrupted)
            check_partial(error, sum(len(report.finished) for report in rounds))
        assert_nothing_allocated(solver)
        solver.solve(PROBLEM)
        assert_nothing_allocated(solver)

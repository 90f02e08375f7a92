"""Faults in the middle of a search: clear errors, nothing is left, what was finished is kept."""

import json
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from beamwright import Solution
from beamwright.cli.output import print_json
from beamwright.engine.scoring import make_score_events
from beamwright.errors import (
    BeamwrightError,
    CapacityError,
    DeviceMemoryError,
    InputError,
    Interrupted,
    LinkError,
    NotFiniteError,
)
from beamwright.kv.pool import BlockLedger
from beamwright.models.dense import DenseDecoder
from beamwright.models.tree_model import TreeModel
from beamwright.verify.prm import PrmVerifier
from beamwright_lab.baselines.layerwise import streams
from engines import PROBLEM, FailingDevice, assert_nothing_allocated, assert_same, grow

SMALL = {"n": 8, "width": 4, "max_rounds": 4, "host_memory": "1MiB"}
TIGHT = {"schedule": "locality", "kv_memory": 9 * 4096, "n": 12, "host_memory": "1MiB"}
HOW = [
    {"schedule": "in-gpu"},
    {"schedule": "locality"},
    {"schedule": "locality", "kv_memory": 10 * 4096},
    {"schedule": "layerwise"},
]
SCORED = {"verifier": "a model", "n": 4, "max_rounds": 2}


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
    "how",
    [*HOW[:2], pytest.param(HOW[2], marks=pytest.mark.nightly), HOW[3], {**HOW[1], **SCORED}],
    ids=str,
)
def test_an_allocation_that_fails_anywhere(make_solver, verifier_folder, monkeypatch, how):
    """A correct result or a clear error, whatever place in the code it is of."""
    ledger = FailingLedger(monkeypatch)
    rounds, how = [], {**SMALL, **how}
    if "verifier" in how:
        how["verifier"] = str(verifier_folder)
    with make_solver(**how) as solver:
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
                assert "too small" in str(error)
                assert "\n" not in str(error)
                finished = sum(len(report.finished) for report in rounds)
                check_partial(error, finished)
            assert_nothing_allocated(solver)
        ledger.arm(None)
        assert solver.solve(PROBLEM).tree_hash == expected
    # Most are met by asking again for less; those of a prompt or a lone row are not.
    assert errors < len(calls)


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
    for call in (1, num_copies // 3, 2 * num_copies // 3):
        count[0], fails_at[0] = 0, call
        with pytest.raises(LinkError, match=r"copying KV .*failed: .*the link is gone"):
            solver.solve(PROBLEM)
        assert_nothing_allocated(solver)
        solver.close()
        fails_at[0] = 0
        assert solver.solve(PROBLEM).tree_hash == expected, "it works again"
    solver.close()


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


@pytest.mark.parametrize("call", [1, 9])
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


# --- working memory: the group shrinks, the tree stays the same ----------------------------------


ROOMY = {"n": 16, "width": 4, "max_rounds": 3, "host_memory": "1MiB"}
WAYS = [
    {"schedule": "in-gpu"},
    {"attention": "dense"},
    {"schedule": "locality", "kv_memory": 22 * 4096, "graphs": "on"},
]


PREFILL = {"step_tokens": 10, "ignore_eos": True}


@pytest.mark.parametrize(
    ("call", "most_rows", "how"), [*(("logits", 8, how) for how in WAYS), ("hidden", 64, PREFILL)]
)
def test_a_group_or_a_prefill_that_is_too_large_is_halved(
    make_solver, verifier_folder, monkeypatch, call, most_rows, how
):
    options = {**ROOMY, **how}
    if how is PREFILL:
        options["verifier"] = str(verifier_folder)
    expected, _ = grow(make_solver(**options))
    solver = make_solver(**options)
    device = FailingDevice(
        monkeypatch, lambda name, rows, _: (name, rows > most_rows) == (call, True)
    )
    solution, _ = grow(solver)
    assert device.num_failures
    assert_same(solution, expected)
    assert solution.kv.groups >= expected.kv.groups


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.nightly) for how in WAYS[:2]), *WAYS[2:]]
)
def test_any_call_may_fail_once(make_solver, verifier_folder, monkeypatch, how):
    how = {**ROOMY, "n": 4, "max_rounds": 3, **how, "verifier": str(verifier_folder)}
    solver = make_solver(**how)
    with monkeypatch.context() as patched:
        counting = FailingDevice(patched, lambda *_: False)
        expected, _ = grow(solver)
    single = 0
    for call in range(1, counting.num_calls + 1, max(1, counting.num_calls // 3)):
        solver = make_solver(**how)
        with monkeypatch.context() as patched:
            FailingDevice(patched, lambda name, rows, number, call=call: number == call)
            try:
                solution, _ = grow(solver)
            except DeviceMemoryError:
                assert_nothing_allocated(solver)
                single += 1  # a lone prompt or beam cannot be made smaller
                continue
        assert solution.tree_hash == expected.tree_hash
    assert single < 4


@pytest.mark.parametrize("where", ["decode", "verify"])
def test_what_does_not_fit_at_all_ends_the_search_in_one_line(
    make_solver, verifier_folder, monkeypatch, where
):
    solver = make_solver(**ROOMY, verifier=str(verifier_folder))

    def fail(*_):
        raise torch.OutOfMemoryError("an injected failure")

    message = "out of memory: one beam's step"
    if where == "decode":
        FailingDevice(monkeypatch, lambda name, rows, _: name == "logits")
    else:
        monkeypatch.setattr(solver.verifier, "_read", fail)
        message = r"out of memory: a round .* \(verify\)"
    with pytest.raises(DeviceMemoryError, match=message):
        solver.solve(PROBLEM)
    assert_nothing_allocated(solver)


# --- numbers that are none: named where they arise, and what was finished is kept ----------------


NAN, INF = float("nan"), float("inf")


class BrokenFrom:
    """A decoder's `logits` that turn into `value` from the k-th call on."""

    def __init__(self, decoder, call, value=NAN):
        self.real, self.call, self.value, self.count = decoder.logits, call, value, 0
        decoder.logits = self

    def __call__(self, hidden):
        self.count += 1
        found = self.real(hidden)
        return torch.full_like(found, self.value) if self.count > self.call else found


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_logits_that_are_no_numbers_stop_the_search_and_keep_what_is_finished(
    make_solver, graphs, value
):
    with make_solver(n=8, graphs=graphs, verifier="none") as solver:
        solver.solve(PROBLEM)
        seen = []
        broken = BrokenFrom(solver.generator.decoder, 10**9, value)
        solver.solve(PROBLEM, on_round=lambda report: seen.append((broken.count, report)))
        call = next(count for count, report in seen if report.tree.finished()) + 1
        broken.count, broken.call = 0, call
        with pytest.raises(
            NotFiniteError, match=r"generator's logits .* problem 0, step \d+"
        ) as caught:
            solver.solve(PROBLEM)
        assert caught.value.partial.candidates
        json.dumps(caught.value.partial.to_json(), allow_nan=False)
        assert_nothing_allocated(solver)


@pytest.mark.parametrize("value", [NAN, INF, 1e308])
@pytest.mark.parametrize("search", ["beam", "mcts", "particles", "deepconf", "dvts"])
def test_no_strategy_sees_a_score_that_cannot_be_summed(make_solver, search, value):
    more = {"verifier": "deepconf"} if search == "deepconf" else {}
    with make_solver(n=4, width=2, search=search, **more) as solver:
        solver.verifier.score = lambda nodes: [value for _ in nodes]
        with pytest.raises(NotFiniteError, match="problem 0, step 1"):
            solver.solve(PROBLEM)


def out_of_memory():
    raise torch.OutOfMemoryError("an injected failure")


@pytest.mark.parametrize(
    ("score", "error"), [(lambda: NAN, NotFiniteError), (out_of_memory, DeviceMemoryError)]
)
def test_one_problem_of_a_batch_fails_alone(make_solver, monkeypatch, score, error):
    problems = [(name, PROBLEM) for name in "abc"]
    with make_solver(n=4) as solver:
        expected = [solver.solve(text, problem_id=name).tree_hash for name, text in problems]
        real = solver.verifier.score

        def scored_or_not(nodes):
            broken = any(node.problem_id == "b" for node in nodes)
            return [score() for _ in nodes] if broken else real(nodes)

        monkeypatch.setattr(solver.verifier, "score", scored_or_not)
        first, second, third = solver.solve_many(problems)
        assert isinstance(second, error)
        assert [first.tree_hash, third.tree_hash] == [expected[0], expected[2]]
        assert_nothing_allocated(solver)


def test_a_path_whose_scores_overflow_is_named(make_solver):
    with make_solver(n=4, verifier="none", aggregate="prod") as solver:
        solver.verifier.score = lambda nodes: [1e20 for _ in nodes]
        overflow = r"the path score of problem 0, step 2 is 1e\+40"
        with pytest.raises(NotFiniteError, match=overflow):
            solver.solve(PROBLEM)


MINE = SimpleNamespace(name="mine", default_aggregate="last", probabilities=False)
STEP = SimpleNamespace(problem_id=7, depth=3)


@pytest.mark.parametrize("scores", [[0.5], [0.5, "good"], [0.5, [1]], [0.5, 1j]])
def test_a_verifier_that_returns_something_else(scores):
    with pytest.raises(InputError, match="verifier mine"):
        make_score_events(MINE, [STEP, STEP], scores)


def test_numbers_of_other_libraries_are_numbers():
    events = make_score_events(MINE, [STEP, STEP], [np.float32(0.5), None])
    assert [event.score for event in events] == [0.5, None]
    assert type(events[0].score) is float


def test_json_stays_json(capsys):
    print_json({"a": NAN, "b": [INF, 1.5], "c": {"d": (-INF, "NaN")}})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": None, "b": [None, 1.5], "c": {"d": [None, "NaN"]}}

"""Plain and captured steps: the same bits, whatever happens between iterations."""

from functools import partial

import pytest
import torch

from beamwright.engine.batch import RunningBatch
from beamwright.engine.graphs import Replay, make_replay
from beamwright.kv.link import StreamLink
from beamwright.search import STRATEGIES
from beamwright.sections import ScheduleSettings
from declared import real_options
from engines import PROBLEM, FailingDevice, assert_nothing_allocated, grow
from tape import FixedAttention, put_on_tape

FAST = {"n": 8, "width": 2, "max_rounds": 12, "max_step_tokens": 12, "max_tokens": 30}
LONG = {"delimiter": "Zq", "max_step_tokens": 75, "max_tokens": 160, "ignore_eos": True}


def facts(tree):
    """Everything that plain and captured steps must agree on, bit for bit."""
    return [(n.lineage, n.token_ids, n.logprobs, n.stop, n.text, n.score) for n in tree.nodes()]


def both(build, **options):
    """(solution, facts) of plain steps and of steps that could be captured."""
    found = []
    for graphs in ("off", "on"):
        with build(graphs=graphs, **options) as solver:
            assert solver._machinery.batch._rows._stays == (graphs == "on")
            solution, tree = grow(solver)
            found.append((solution, facts(tree)))
    return found


@pytest.fixture
def on_tape(monkeypatch):
    """See `tape.put_on_tape`."""
    return partial(put_on_tape, monkeypatch)


# --- bursts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_grows_the_same_tree(make_solver, name):
    options = real_options(name, **FAST)
    _, tree = grow(make_solver(**options))
    least = max(node.end // 16 + 2 * node.depth for node in tree.nodes()) + 4
    with make_solver(
        **options, graphs="on", schedule="locality", kv_memory=least * 4096, host_memory="1MiB"
    ) as tight:
        assert facts(grow(tight)[1]) == facts(tree)


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "reference", "max_rounds": 3},
        {"attention": "dense", "max_rounds": 3},
        {"temperature": 0, "max_rounds": 2},
        {"top_k": 4, "top_p": 0.9, "min_p": 0.01, "max_rounds": 2},
        {"context": 60, "max_tokens": None, "ignore_eos": True, "n": 4, "width": 2},
        {"step_tokens": 280, "max_tokens": 280, "ignore_eos": True, "n": 3, "width": 3},
        {**LONG, "attention": "dense", "max_step_tokens": 90, "max_tokens": 100},
    ],
    ids=str,
)
def test_every_way_to_draw_and_to_end(make_solver, options):
    (plain, expected), (burst, found) = both(make_solver, **options)
    assert found == expected
    assert burst.tree_hash == plain.tree_hash
    assert burst.tokens.generated == plain.tokens.generated


def test_what_is_drawn_after_the_end_is_dropped_and_counted(make_solver):
    """A captured step learns of its end a token late, except where a limit says it beforehand."""
    found = []
    for graphs in ("off", "on"):
        solver = make_solver(graphs=graphs, n=4, width=4, max_rounds=3, max_batch=1)
        found.append(grow(solver)[0])
    assert found[0].tokens.overrun == found[1].tokens.overrun == 0, "nobody waits for others"
    fixed = {"step_tokens": 6, "ignore_eos": True, "max_rounds": 2, "n": 4}
    assert both(make_solver, **fixed)[1][0].tokens.overrun == 0
    together = make_solver(n=8, width=4, max_rounds=3)
    assert grow(together)[0].tokens.overrun > 0


@pytest.mark.parametrize(("attention", "evict"), [("tree", "recompute"), ("dense", "host")])
def test_beams_are_parked_and_moved_as_token_by_token(make_solver, monkeypatch, attention, evict):
    """Same rows preempted, same bytes over the link: iterations end alike."""
    parked, real = [], RunningBatch._preempt
    monkeypatch.setattr(
        RunningBatch,
        "_preempt",
        lambda self, row: (parked.append((row.node.lineage, len(row.tokens))), real(self, row)),
    )
    # Bytes that a cancellation takes back depend on how far the copier is; here all arrive.
    monkeypatch.setattr(StreamLink, "cancel", lambda self, transfers: self.wait(list(transfers)))
    dtype = "float64" if evict == "recompute" else "float32"
    how = {"attention": attention, "evict": evict, "batching": "continuous"}
    build = partial(make_solver, dtype=dtype, **how, **LONG)
    block = build(schedule="in-gpu").generator.store.device.bytes_per_block
    (plain, expected), (burst, found) = both(
        partial(build, n=8, max_rounds=1, host_memory="8MiB"),
        schedule="locality",
        kv_memory=15 * block,
    )
    assert found == expected
    half = len(parked) // 2
    assert half
    assert parked[:half] == parked[half:]
    assert burst.kv.h2d_bytes == plain.kv.h2d_bytes
    assert burst.kv.d2h_bytes == plain.kv.d2h_bytes
    assert burst.kv.device_peak_bytes <= 15 * block


def test_a_group_that_is_too_large_is_halved(make_solver, monkeypatch):
    options = {"n": 16, "width": 4, "max_rounds": 6, "step_tokens": 8, "ignore_eos": True}
    expected, tree = grow(make_solver(**options))
    seen = []

    def fails(name, rows, _):
        seen.append(name)
        return name == "logits" and seen.count("logits") == 4

    solver = make_solver(**options, graphs="on")
    FailingDevice(monkeypatch, fails)
    solution, found = grow(solver)
    assert facts(found) == facts(tree)
    assert solution.tokens.overrun == expected.tokens.overrun + 3 * 16


@pytest.mark.parametrize("call", range(2, 60, 14))
def test_any_call_may_fail_once(make_solver, monkeypatch, call):
    options = {"n": 16, "width": 4, "max_rounds": 4, "kv_memory": 22 * 4096, "host_memory": "1MiB"}
    expected, _ = grow(make_solver(**options))
    solver = make_solver(**options, graphs="on")
    device = FailingDevice(monkeypatch, lambda name, rows, number: number == call)
    assert grow(solver)[0].tree_hash == expected.tree_hash
    assert device.num_failures


# --- captured steps --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch": 3},
        {**LONG, "max_step_tokens": 40, "n": 8, "max_rounds": 2, "blocks": 10},
        {"step_tokens": 70, "max_tokens": 150, "ignore_eos": True, "n": 4, "width": 2},
        {"search": "lookahead", "lookahead": 2, "max_rounds": 3, "n": 4, "width": 2},
    ],
    ids=str,
)
def test_a_replayed_step_sees_what_the_host_has_changed(make_solver, on_tape, options):
    """Tapes hold addresses and numbers, as graphs do: rows, tails, lists and parking go on."""
    options = dict(options)
    blocks = options.pop("blocks", None)
    expected, tree = grow(make_solver(dtype="float64", **options))
    if blocks is not None:
        block = 2 * 4096
        tiers = {"schedule": "locality", "kv_memory": blocks * block, "host_memory": "8MiB"}
        options.update(tiers)
    with make_solver(dtype="float64", graphs="on", **options) as solver:
        replay = on_tape(solver, FixedAttention(solver.generator.backend))
        solution, found = grow(solver)
        assert solution.tree_hash == expected.tree_hash
        assert [n.text for n in found.nodes()] == [n.text for n in tree.nodes()]
        assert replay.num_played > 10
        assert_nothing_allocated(solver)


def test_the_next_problem_replays_the_steps_of_the_one_before(make_solver, on_tape):
    options = {"dtype": "float64", "n": 8, "max_rounds": 2}
    expected = make_solver(**options).solve(PROBLEM)
    solver = make_solver(graphs="on", **options)
    replay = on_tape(solver, FixedAttention(solver.generator.backend))
    first = solver.solve(PROBLEM)
    held = dict(replay.tapes)
    assert solver.solve(PROBLEM).tree_hash == first.tree_hash == expected.tree_hash
    assert replay.tapes == held


def test_a_backend_that_counts_on_the_host_cannot_be_captured(make_solver, on_tape):
    """The tape would find it out: plain torch reads as many tokens as the host has counted."""
    expected = grow(make_solver(dtype="float64"))[0]
    solver = make_solver(dtype="float64", graphs="on")
    on_tape(solver, solver.generator.backend)
    assert solver.solve(PROBLEM).tree_hash != expected.tree_hash


def test_buffers_stay_where_they_are_until_they_grow(make_solver):
    solver = make_solver(graphs="on")
    rows = solver._machinery.batch._rows
    grow(solver)
    moves, places = rows._session.num_moves, {n: vars(b) for n, b in rows._buffers.items()}
    before = {
        n: {k: v.data_ptr() for k, v in held.items() if isinstance(v, torch.Tensor)}
        for n, held in places.items()
    }
    tail = rows._session._tail._flat.data_ptr()
    grow(solver)
    assert rows._session.num_moves == moves
    assert rows._session._tail._flat.data_ptr() == tail
    for num_rows, held in before.items():
        assert held == {k: getattr(rows._buffers[num_rows], k).data_ptr() for k in held}
    assert solver.generator.store.scratch.used_bytes > 0
    rows.release()
    assert solver.generator.store.scratch.used_bytes == 0


# --- when ------------------------------------------------------------------------------------


def test_when_steps_stay_in_place(make_solver):
    model = make_solver().generator
    assert ScheduleSettings().graphs == "auto"
    assert make_replay("auto", model, print) is None
    assert make_replay("off", model, print) is None
    assert isinstance(make_replay("on", model, print), Replay)
    streamed = make_solver(schedule="layerwise", graphs="on", host_memory="8MiB")
    assert make_replay("on", streamed.generator, print) is None

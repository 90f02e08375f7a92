"""Rows join and leave while one captured step is played again and again: nothing in it moves."""

from functools import partial

import pytest
import torch

from beamwright.engine.sampling import Sampler
from beamwright.engine.tensor_rows import TensorRows
from engines import grow
from tape import FixedAttention, HostReadError, put_on_tape

# In float64 the plain loop of another backend draws the same tokens; no step leaves 16 tokens.
SAME = {"dtype": "float64", "n": 16, "max_rounds": 3, "max_step_tokens": 12, "max_tokens": 36}

CPU = torch.device("cpu")


@pytest.fixture
def on_tape(monkeypatch):
    """A solver with tapes; see `tape.put_on_tape`."""

    def make(solver):
        return put_on_tape(monkeypatch, solver, FixedAttention(solver.generator.backend))

    return make


@pytest.fixture
def admissions(monkeypatch):
    """(rows that stay and their tokens, rows that join) of every admission to a batch."""
    found, real = [], TensorRows.admit

    def admit(self, staying, joining):
        if joining:
            found.append(([len(row.tokens) for row in staying], len(joining)))
        real(self, staying, joining)

    monkeypatch.setattr(TensorRows, "admit", admit)
    return found


def facts(tree):
    return [(n.lineage, n.token_ids, n.stop, n.text) for n in tree.nodes()]


def ragged(admissions):
    """Admissions beside rows in the middle of their steps, of different lengths."""
    return [joining for staying, joining in admissions if len(set(staying)) > 1]


def test_a_row_is_admitted_without_a_new_capture(make_solver, on_tape, admissions):
    expected = grow(make_solver(**SAME))[1]
    admissions.clear()
    solver = make_solver(**SAME, graphs="on", max_batch=7)
    replay = on_tape(solver)
    assert facts(grow(solver)[1]) == facts(expected)
    assert len(ragged(admissions)) > 4
    shapes = set(replay.keys)
    assert {num_rows for ((num_rows, _), _) in shapes} == {8}, "seven rows are padded to eight"
    moves = solver._machinery.batch._rows._session.num_moves
    assert replay.num_recorded <= len(shapes) + moves
    # What is there has room by now: another search records nothing at all.
    before, admitted = replay.num_recorded, len(ragged(admissions))
    assert facts(grow(solver)[1]) == facts(expected)
    assert replay.num_recorded == before
    assert len(ragged(admissions)) == 2 * admitted


def test_static_buffers_keep_their_addresses(make_solver, on_tape, monkeypatch):
    """Not the tape's word alone: where everything is that a step reads and writes."""
    solver = make_solver(**SAME, graphs="on", max_batch=7)
    replay = on_tape(solver)
    grow(solver)
    rows, seen = solver._machinery.batch._rows, []

    def addresses():
        buffers, tail = rows._step_buffers(), rows._session._tail
        state = [buffers.tokens, buffers.positions, buffers.keys, buffers.index]
        state += [*buffers.results.values(), *buffers.sampling.tensors]
        return [each.data_ptr() for each in (*state, tail.storage, tail.places, tail.counts)]

    real = type(replay).run

    def run(self, key, version, step):
        seen.append((key, version, addresses()))
        real(self, key, version, step)

    monkeypatch.setattr(type(replay), "run", run)
    grow(solver)
    assert len(seen) > 20
    assert all(each[1:] == seen[0][1:] for each in seen)


def test_preempted_rows_come_back_to_the_same_tape(make_solver, on_tape):
    """Their tokens are read back into the tail, in place."""
    long = {"delimiter": "Zq", "max_step_tokens": 75, "max_tokens": 160, "ignore_eos": True}
    build = partial(make_solver, **{**SAME, **long, "n": 8, "max_rounds": 1})
    expected = grow(build())[1]
    tight = {"schedule": "locality", "kv_memory": 15 * 4096 * 2, "host_memory": "8MiB"}
    with build(graphs="on", **tight) as solver:
        replay = on_tape(solver)
        assert facts(grow(solver)[1]) == facts(expected)
        assert solver._machinery.batch.counts.preempted > 0
        before = replay.num_recorded
        grow(solver)
        assert replay.num_recorded == before


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_the_kernel_that_draws_is_part_of_the_step(make_solver, on_tape, filters):
    pytest.importorskip("triton")
    short = {**SAME, "n": 4, "max_rounds": 2, "max_step_tokens": 6, **filters}
    expected = grow(make_solver(**short))[1]
    solver = make_solver(**short, graphs="on")
    replay, rows = on_tape(solver), solver._machinery.batch._rows
    num_tokens = rows._sampler._num_tokens
    rows._sampler = Sampler(num_tokens, CPU, captured=True, fused=True)
    assert facts(grow(solver)[1]) == facts(expected)
    assert replay.num_played > 4


def test_a_step_that_asks_the_device_is_found_out(make_solver, on_tape, monkeypatch):
    """Else the tests above would show nothing."""
    solver = make_solver(**SAME, graphs="on")
    on_tape(solver)
    real = TensorRows._step

    def asks(self, buffers):
        real(self, buffers)
        buffers.tokens.any().item()

    monkeypatch.setattr(TensorRows, "_step", asks)
    with pytest.raises(HostReadError):
        grow(solver)

"""Plain and captured steps: the same bits, whatever happens between iterations."""

import pytest

from beamwright.engine.tensor_rows import TensorRows
from engines import assert_nothing_allocated, facts, grow
from tape import FixedAttention, HostReadError, put_late, put_on_tape

LONG = {"delimiter": "Zq", "max_step_tokens": 75, "max_tokens": 160, "ignore_eos": True}
# In float64 the plain loop of another backend draws the same tokens; no step leaves 16 tokens.
SAME = {"dtype": "float64", "n": 16, "max_rounds": 3, "max_step_tokens": 12, "max_tokens": 36}


@pytest.fixture
def on_tape(monkeypatch):
    """A solver with tapes; see `tape.put_on_tape`."""

    def make(solver):
        return put_on_tape(monkeypatch, solver, FixedAttention(solver.generator.backend))

    return make


# --- captured steps --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch": 3},
        {"step_tokens": 70, "max_tokens": 150, "ignore_eos": True, "n": 4, "width": 2},
        {"search": "lookahead", "lookahead": 2, "max_rounds": 3, "n": 4, "width": 2},
    ],
    ids=str,
)
def test_a_replayed_step_sees_what_the_host_has_changed(make_solver, on_tape, options):
    """Tapes hold addresses and numbers, as graphs do: rows, tails, lists and parking go on."""
    expected, tree = grow(make_solver(dtype="float64", **options))
    with make_solver(dtype="float64", graphs="on", **options) as solver:
        replay = on_tape(solver)
        solution, found = grow(solver)
        assert solution.tree_hash == expected.tree_hash
        assert [n.text for n in found.nodes()] == [n.text for n in tree.nodes()]
        assert replay.num_played > 10
        assert_nothing_allocated(solver)


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


# --- one step ahead --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "is_kept"),
    [
        ({"step_tokens": 70, "max_tokens": 150, "ignore_eos": True, "top_logprobs": 2}, True),
        ({**LONG, "top_k": 4, "min_p": 0.01}, True),
        ({"max_batch": 3}, False),
        ({"n": 24, "step_tokens": 70, "max_tokens": 140, "max_rounds": 2}, True),
        ({**LONG, "n": 8, "kv_memory": "128KiB", "host_memory": "4MiB"}, True),
        ({"search": "lookahead", "lookahead": 2, "max_rounds": 3}, False),
    ],
    ids=str,
)
def test_a_step_that_is_begun_ahead_changes_nothing(make_solver, monkeypatch, options, is_kept):
    """It is kept by rows that stay together, and drawn again by those that are arranged anew."""
    expected, tree = grow(make_solver(dtype="float64", **options))
    kept, dropped = [], []
    take, drop = TensorRows._run_plain, TensorRows._drop_begun

    def taken(self, *parts):
        kept.append(self._begun)
        return take(self, *parts)

    def seen(self):
        dropped.append(self._begun)
        drop(self)

    monkeypatch.setattr(TensorRows, "_run_plain", taken)
    monkeypatch.setattr(TensorRows, "_drop_begun", seen)
    with make_solver(dtype="float64", graphs="on", **options) as solver:
        put_late(solver)
        solution, found = grow(solver)
        assert_nothing_allocated(solver)
    assert facts(found) == facts(tree)
    assert solution.tree_hash == expected.tree_hash
    assert any(kept) == is_kept
    assert any(dropped) <= (solution.tokens.overrun > expected.tokens.overrun)

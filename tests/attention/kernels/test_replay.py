"""The kernels in a step that is captured once and replayed, as a CUDA graph would be."""

import pytest
import torch

pytest.importorskip("triton")

from beamwright import Solver
from beamwright.engine import tensor_rows
from beamwright.engine.graphs import CudaGraphReplay
from beamwright.models import decoder
from beamwright.models.session import DecodeSession
from engines import assert_nothing_allocated
from tape import Late, put_on_tape

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the solver is on the CPU")
SHAPE = "llama,layers=1,hidden=32,heads=2,kv_heads=1,intermediate=48,vocab=64,context=64"
SMALL = {
    "model": f"random:{SHAPE}",
    "verifier": "none",
    "n": 4,
    "width": 2,
    "max_rounds": 3,
    "step_tokens": 4,
    "ignore_eos": True,
    "kv_memory": "64KiB",
}


def drawn(device, graphs, monkeypatch=None, **changes):
    """(token ids, log-probabilities, stop) of every node; the solver; its tapes, if asked for."""
    found, replay = [], None
    solver = Solver(attention="triton-tree", graphs=graphs, device=device, **{**SMALL, **changes})
    if monkeypatch is not None:
        replay = put_on_tape(monkeypatch, solver, solver.generator.backend)
    solver.synthetic(9, on_round=lambda report: found.append(report.tree))
    assert_nothing_allocated(solver)
    return [(n.token_ids, n.logprobs, n.stop) for n in found[-1].nodes()], solver, replay


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
def test_a_cuda_graph_has_the_bits_of_the_plain_loop():
    expected, _, _ = drawn("cuda", "off")
    found, solver, _ = drawn("cuda", "on")
    assert isinstance(solver._machinery.batch._rows.replay, CudaGraphReplay)
    assert solver._machinery.batch._rows.replay._graphs
    assert found == expected


@pytest.mark.nightly
@ON_CPU
def test_a_replayed_search_has_the_bits_of_the_plain_loop(monkeypatch):
    """Work lists are rewritten in place between replays; where they have grown, a new tape."""
    expected, _, _ = drawn("cpu", "off")
    found, solver, replay = drawn("cpu", "on", monkeypatch)
    assert len(expected) > 12
    assert found == expected
    # Tables of rows' own blocks, lists and partial results.
    assert solver._machinery.batch._rows._session.num_moves == 3, "nothing has grown"
    # Each round's four tokens are forwarded by steps; the first of all is recorded.
    assert (replay.num_recorded, replay.num_played) == (1, 4 * SMALL["max_rounds"] - 1)


@pytest.mark.nightly
@ON_CPU
def test_a_row_that_joins_needs_no_new_tape(monkeypatch):
    """Three at a time: as one leaves another joins, beside rows that are in mid-step."""
    changes = {"max_rounds": 2, "step_tokens": None, "max_step_tokens": 7}
    expected, _, _ = drawn("cpu", "off", **changes)
    found, _, replay = drawn("cpu", "on", monkeypatch, **changes, max_batch=3)
    assert found == expected
    assert replay.num_recorded == 1
    assert replay.num_played > 6


@ON_CPU
def test_rows_that_pad_the_batch_change_no_bits(monkeypatch):
    changes = {"max_rounds": 1, "step_tokens": 2}
    expected, _, _ = drawn("cpu", "off", **changes)
    monkeypatch.setattr(decoder, "_CAPTURED_ROWS", (16,))
    found, solver, _ = drawn("cpu", "on", monkeypatch, **changes)
    assert found == expected
    assert [*solver._machinery.batch._rows._buffers] == [16]


@pytest.mark.nightly
@ON_CPU
def test_a_step_that_is_begun_ahead_writes_where_it_is_read(monkeypatch):
    """Its token is the first of a block that the iteration before it had no need of."""
    changes = {"max_rounds": 1, "step_tokens": None, "max_step_tokens": 19, "n": 2}
    expected, _, _ = drawn("cpu", "off", **changes)
    asked, real = [], DecodeSession.has_room
    monkeypatch.setattr(
        DecodeSession, "has_room", lambda *given: asked.append(real(*given)) or asked[-1]
    )
    monkeypatch.setattr(tensor_rows, "make_replay", lambda *_: Late())
    assert drawn("cpu", "on", **changes)[0] == expected
    assert True in asked

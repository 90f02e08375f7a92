"""The kernels in a step that is captured once and replayed, as a CUDA graph would be."""

import pytest
import torch

pytest.importorskip("triton")

from beamwright import Solver
from beamwright.attention.kernels import views
from beamwright.engine import tensor_rows
from beamwright.engine.graphs import CudaGraphReplay
from beamwright.models import decoder
from beamwright.models.packed import Replay
from beamwright.models.session import DecodeSession
from engines import assert_nothing_allocated
from tape import Late, put_on_tape

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
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
@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
def test_a_row_that_joins_needs_no_new_tape(monkeypatch):
    """Three at a time: as one leaves another joins, beside rows that are in mid-step."""
    changes = {"max_rounds": 2, "step_tokens": None, "max_step_tokens": 7}
    expected, _, _ = drawn("cpu", "off", **changes)
    found, _, replay = drawn("cpu", "on", monkeypatch, **changes, max_batch=3)
    assert found == expected
    assert replay.num_recorded == 1
    assert replay.num_played > 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
def test_rows_that_pad_the_batch_change_no_bits(monkeypatch):
    changes = {"max_rounds": 1, "step_tokens": 2}
    expected, _, _ = drawn("cpu", "off", **changes)
    monkeypatch.setattr(decoder, "_CAPTURED_ROWS", (16,))
    found, solver, _ = drawn("cpu", "on", monkeypatch, **changes)
    assert found == expected
    assert [*solver._machinery.batch._rows._buffers] == [16]


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
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


class Counted(Replay):
    """Counts what `CudaGraphReplay` would capture, and what of it would be void."""

    is_plain = False

    def __init__(self):
        self.version, self.runs, self.captured, self.num_void = None, {}, [], 0

    def run(self, key, version, step):
        if version != self.version:
            self.num_void += sum(count > 1 for count in self.runs.values())
            self.version, self.runs = version, {}
        self.runs[key] = self.runs.get(key, 0) + 1
        if self.runs[key] == 2:
            self.captured.append(key)
        step()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
@pytest.mark.parametrize(("changes", "rows"), [({}, {64}), ({"max_batch": 24}, {32})])
def test_a_search_captures_few_steps_and_voids_none(monkeypatch, changes, rows):
    """Steps end at a delimiter. What attention finds does not matter here, and takes long."""
    for name in ("decode_attention", "prefill_attention"):
        monkeypatch.setattr(views, name, lambda query, *_: query.clone())
    replay = Counted()
    monkeypatch.setattr(tensor_rows, "make_replay", lambda *_: replay)
    found, steps = [], {"delimiter": " ", "max_step_tokens": 200, "max_rounds": 4}
    wide = {"n": 64, "width": 4, "kv_memory": "32MiB", "verifier": "none", "graphs": "on"}
    with Solver(model="bundled", attention="triton-tree", **wide, **steps, **changes) as solver:
        solver.solve("What is 17 * 23?", on_round=lambda report: found.append(report.tree))
        assert_nothing_allocated(solver)
    assert len({len(node.token_ids) for node in found[-1].nodes()}) > 5
    assert {size for (size, _), _ in replay.captured} <= {8, 16, 32, *rows}
    assert len(replay.captured) == len(set(replay.captured)) <= 4
    assert replay.num_void == 0

"""The kernels in a step that is captured once and replayed, as a CUDA graph would be."""

import pytest
import torch

pytest.importorskip("triton")

from beamwright import Solver
from beamwright.runtime.replay import CudaGraphReplay
from engines import assert_nothing_allocated
from tape import put_on_tape

SHAPE = "llama,layers=1,hidden=32,heads=2,kv_heads=1,intermediate=48,vocab=64,context=64"
SMALL = {
    "model": f"random:{SHAPE}",
    "verifier": "none",
    "n": 4,
    "width": 2,
    "max_rounds": 4,
    "step_tokens": 4,
    "ignore_eos": True,
    "kv_memory": "64KiB",
}


def drawn(device, graphs, monkeypatch=None):
    """(token ids, log-probabilities, stop) of every node; the solver; its tapes, if asked for."""
    found, replay = [], None
    solver = Solver(attention="triton-tree", graphs=graphs, device=device, **SMALL)
    if monkeypatch is not None:
        replay = put_on_tape(monkeypatch, solver, solver.generator.backend)
    solver.synthetic(9, on_round=lambda report: found.append(report.tree))
    assert_nothing_allocated(solver)
    return [(n.token_ids, n.logprobs, n.stop) for n in found[-1].nodes()], solver, replay


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
def test_a_cuda_graph_has_the_bits_of_the_plain_loop():
    expected, _, _ = drawn("cuda", "off")
    found, solver, _ = drawn("cuda", "on")
    assert isinstance(solver._decoder._bursts.replay, CudaGraphReplay)
    assert solver._decoder._bursts.replay._graphs
    assert found == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
def test_a_replayed_search_has_the_bits_of_the_plain_loop(monkeypatch):
    """Work lists are rewritten in place between replays; where they have grown, a new tape."""
    expected, _, _ = drawn("cpu", "off")
    found, solver, replay = drawn("cpu", "on", monkeypatch)
    assert len(expected) > 12
    assert found == expected
    bursts = solver._decoder._bursts
    assert bursts.buffers.num_moves == 3, "a tail, lists and partial results; none has grown"
    # Of each round's four tokens three are drawn in its burst; the first of all is recorded.
    assert replay.num_played == 3 * SMALL["max_rounds"] - 1
    assert len(replay.tapes) == 1

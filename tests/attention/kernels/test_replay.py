"""The kernels in a step that is captured once and replayed, as a CUDA graph would be."""

import pytest
import torch

pytest.importorskip("triton")

from beamwright import Solver
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
def test_a_replayed_search_has_the_bits_of_the_plain_loop(kernels, monkeypatch):
    """Work lists are rewritten in place between replays; where they have grown, a new tape."""
    facts = []
    for graphs in ("off", "on"):
        found = []
        solver = Solver(attention="triton-tree", graphs=graphs, **SMALL)
        if graphs == "on":
            replay = put_on_tape(monkeypatch, solver, solver.generator.backend)
        solver.synthetic(9, on_round=lambda report, found=found: found.append(report.tree))
        assert_nothing_allocated(solver)
        facts.append([(n.token_ids, n.logprobs, n.stop) for n in found[-1].nodes()])
    assert len(facts[0]) > 12
    assert facts[0] == facts[1]
    bursts = solver._decoder._bursts
    assert bursts.buffers.num_moves == 3, "a tail, lists and partial results; none has grown"
    # Of each round's four tokens three are drawn in its burst; the first of all is recorded.
    assert replay.num_played == 3 * SMALL["max_rounds"] - 1
    assert len(replay.tapes) == 1

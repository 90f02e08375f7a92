"""The kernels in a step that is captured once and replayed, as a CUDA graph would be."""

import pytest
import torch

pytest.importorskip("triton")

from engines import grow
from tape import put_on_tape

SMALL = {
    "n": 4,
    "width": 2,
    "max_rounds": 2,
    "step_tokens": 5,
    "max_tokens": 10,
    "ignore_eos": True,
    "kv_memory": "512KiB",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
@pytest.mark.parametrize("name", ["triton-tree"])
def test_a_replayed_search_has_the_bits_of_the_plain_loop(make_solver, monkeypatch, name):
    facts = []
    for graphs in ("off", "on"):
        solver = make_solver(attention=name, graphs=graphs, **SMALL)
        if graphs == "on":
            replay = put_on_tape(monkeypatch, solver, solver.generator.backend)
        _, tree = grow(solver, "A?")
        facts.append([(n.token_ids, n.logprobs, n.stop) for n in tree.nodes()])
    assert facts[0] == facts[1]
    assert replay.num_played > 4

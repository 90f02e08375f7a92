"""What `lab/beamwright_lab/gpu/attention_kernels.py` counts and builds; its timing needs a card."""

import pytest
import torch

from beamwright_lab.gpu import attention_kernels


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setitem(attention_kernels.HEADS, "tiny", (1, 2, 16))
    return attention_kernels


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("layout", ["tree", "shared", "separate"])
def test_its_steps_compute_what_the_reference_does(bench, layout, chunk):
    pytest.importorskip("triton")
    case = bench.AttentionCase("x", "tiny", layout, 2, 20, step=10, tail=2, width=2, chunk=chunk)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    built = bench.build(case, torch.float32, device)
    found = []
    for name in ("reference", "triton-dense" if case.per_beam else "triton-tree"):
        step, close = built.step(name)
        found.append(torch.stack([step(layer) for layer in range(2)]))
        assert torch.equal(step(1), found[-1][1]), "a step can be taken again"
        close()
    assert (found[0] - found[1]).abs().max() < 1e-5


def test_both_ways_to_draw_draw_the_same(bench):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, ways = bench.sampling_functions(2, 3000, torch.bfloat16, device)
    (tokens, logprobs), found = ways["torch"](), ways["triton"]()
    assert logits.shape == (2, 3000)
    assert torch.equal(found[0], tokens)
    assert (found[1] - logprobs).abs().max() < 1e-5


def test_every_case_fits_its_pool(bench):
    for case in bench.cases():
        sizes = {name: (1, 1, 16) for name in bench.HEADS}
        bench.HEADS.update(sizes)
        built = bench.build(case, torch.float32, "cpu")
        assert len(built.paths) == case.rows
        assert all(sum(p.visible for p in path) == case.length for path in built.paths)

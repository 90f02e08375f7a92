"""A whole search with the kernels grows the tree that the torch backend grows."""

import pytest
import torch

pytest.importorskip("triton")

from engines import grow

SMALL = {
    "n": 4,
    "width": 2,
    "max_rounds": 2,
    "max_step_tokens": 3,
    "max_tokens": 6,
    "kv_memory": "512KiB",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
def test_a_search_grows_the_same_tree(make_solver, kernels):
    solver = make_solver(attention="tree", **SMALL)
    expected, _ = grow(solver, "A?")
    solver.generator.backend = kernels("triton-tree")
    found, tree = grow(solver, "A?")
    assert found.tree_hash == expected.tree_hash
    assert found.attention == "triton-tree"
    assert max(len(node.path()) for node in tree.nodes()) == 3

"""A whole search with the kernels grows the tree that the torch backend grows."""

import pytest
import torch

pytest.importorskip("triton")

from beamwright.kv.pool import SharedPoolMemory
from beamwright.kv.segments import PathPart
from beamwright.models.linear import prepack_linear
from beamwright.models.prefill import PrefillRequest
from beamwright.models.tree_model import TreeModel
from engines import grow, random_decoder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these run on the CPU")
SMALL = {
    "n": 4,
    "width": 2,
    "max_rounds": 2,
    "max_step_tokens": 3,
    "max_tokens": 6,
    "kv_memory": "512KiB",
}


def test_a_search_grows_the_same_tree(make_solver, kernels):
    solver = make_solver(attention="tree", **SMALL)
    expected, _ = grow(solver, "A?")
    solver.generator.backend = kernels("triton-tree")
    found, tree = grow(solver, "A?")
    assert found.tree_hash == expected.tree_hash
    assert found.attention == "triton-tree"
    assert max(len(node.path()) for node in tree.nodes()) == 3


@torch.inference_mode()
def test_rows_are_read_and_written_where_their_blocks_have_been_moved_to(kernels):
    """In the middle of a step, while another model takes over where they were."""
    shape = "llama,layers=1,hidden=32,heads=2,kv_heads=1,intermediate=64,vocab=64,context=64"
    found, decoder = [], random_decoder(shape, pack=prepack_linear)
    for moves in (False, True):
        model, other = (
            TreeModel(decoder, kernels("triton-tree"), budget, shared=shared)
            for shared in [SharedPoolMemory(1 << 14, 1 << 10)]
            for budget in (1 << 14, 0)
        )
        gone, root, *own = (model.store.create() for _ in range(4))
        for segment, length in ((gone, 64), (root, 19)):
            model.prefill([PrefillRequest((), segment, range(length), 0)])
        session = model.open_session([(PathPart(root, 19),)] * 2, own)
        ids, positions = torch.tensor([3, 4]), torch.tensor([19, 19])
        found.append([session.forward(ids, positions)])
        if moves:
            before = [*root.blocks, *own[0].blocks]
            model.store.free(gone)
            other.store.resize((1 << 14) - model.store.resize(model.budget.used_bytes))
            assert not {*before} & {*root.blocks, *own[0].blocks}
            other.prefill([PrefillRequest((), other.store.create(), [*range(4, 60)], 0)])
        found[-1].append(session.forward(ids, positions + 1))
        for each in (model, other):
            each.store.check()
    assert all(map(torch.equal, *found))

"""Searches with recurrent layers: same trees on every schedule, and a state where one is needed.

The model looks at whose state it gets (`recurring`): that of another row or token fails.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines import PROBLEM, grow, tiny_solver
from hybrids import write_hybrid
from recurring import load_recurring


def test_states_are_kept_where_paths_go_on_and_nowhere_else(make_solver, monkeypatch):
    monkeypatch.setattr("beamwright.solver.machinery.load_model", load_recurring)
    solver = make_solver(n=8, width=4, max_rounds=6, max_tokens=80)

    def on_round(report):
        tree = report.tree
        begun = {node.parent for node in tree.open_nodes()} | {tree.root}
        for node in tree.nodes() if not tree.done else ():
            held = node.handles.get("generator")
            state = held and held.segment.group_segments[-1]
            assert bool(state and state.copies) == (node in begun)

    solver.solve(PROBLEM, on_round=on_round)


SMALL = {
    **{"n": 12, "width": 4, "max_step_tokens": 24, "max_tokens": 48, "max_rounds": 3},
    **{"ignore_eos": True},
}
FAMILIES = ("qwen3_5_text", "granitemoehybrid")  # a gated delta rule; Mamba-2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write_hybrid(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_paths_are_as_likely_as_transformers_says(folders, family):
    """In a quarter of the memory, so that states have left and come back."""
    options = {**SMALL, "dtype": "float32", "temperature": 1.0}
    with tiny_solver(folders[family], schedule="in-gpu", **options) as solver:
        grow(solver)
        need = solver.generator.store.device_peak_bytes
    scarce = {"kv_memory": need // 4, "host_memory": "8MiB", "schedule": "locality"}
    with tiny_solver(folders[family], **options, **scarce) as solver:
        solution, tree = grow(solver)
    assert solution.kv.h2d_bytes > 0
    model = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32).eval()
    leaf = max(tree.nodes(), key=lambda node: node.end)
    ids = torch.tensor([leaf.path_token_ids()])
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits[0].log_softmax(-1)
    steps = leaf.path()[1:]
    found = torch.tensor([logprob for node in steps for logprob in node.logprobs])
    start = steps[0].start
    said = expected[start - 1 : leaf.end - 1].gather(1, ids[0, start:, None])[:, 0]
    assert len(found) == leaf.end - start >= 40
    assert (found - said).abs().max() < 1e-4

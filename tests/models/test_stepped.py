"""Recurrent modules of `transformers` that step by our kernels, in their blocks; interpreted."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("for Triton's interpreter", allow_module_level=True)

from beamwright import Solver
from beamwright.attention.groups import GroupedAttention
from beamwright.models import adapter, steps
from beamwright.models.load import load_model
from beamwright.sections import ModelSettings
from engines import grow
from hybrids import FAMILIES, write_hybrid
from tape import FixedAttention, put_on_tape

MIXED = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
}
SEARCH = {"n": 4, "width": 2, "max_rounds": 2, "delimiter": "e", "max_step_tokens": 9}


@pytest.fixture
def kernels(monkeypatch):
    """As on a card."""
    monkeypatch.setattr(adapter, "can_update_states_in_place", lambda device, dtype: True)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_step_is_the_module_s_own(tmp_path, kernels, monkeypatch, kind):
    """Tried on random rows behind random states, here in float32."""
    monkeypatch.setattr(steps, "_NEAR", 1e-5)
    folder = str(write_hybrid(tmp_path, kind))
    decoder = load_model(folder, ModelSettings(model=folder, dtype="float32")).decoder
    assert decoder.recurrent
    assert all((each.step == each.run_original) == (kind == "jamba") for each in decoder.recurrent)
    assert decoder.updates_states_in_place == (kind != "jamba")  # Mamba's first scan has no kernel


@pytest.mark.parametrize("kind", ["qwen3_5_text", pytest.param("bamba", marks=pytest.mark.nightly)])
def test_captured_steps_make_the_same_tree(tmp_path, monkeypatch, kind):
    folder = str(write_hybrid(tmp_path, kind, num_hidden_layers=2, **MIXED[kind]))
    given = {"model": folder, "verifier": "none", "dtype": "float32", "device": "cpu", **SEARCH}
    with Solver(**given, graphs="off") as solver:
        expected, tree = grow(solver)
    monkeypatch.setattr(adapter, "can_update_states_in_place", lambda device, dtype: True)
    monkeypatch.setattr("beamwright.engine.selftest.batches_are_exact", lambda *_: True)
    with Solver(**given, graphs="on") as solver:
        model = solver.generator
        fixed = FixedAttention(model.backend._inner)
        replay = put_on_tape(monkeypatch, solver, GroupedAttention(fixed, model._places))
        solution, found = grow(solver)
    assert replay.num_played > 5
    assert [n.token_ids for n in found.nodes()] == [n.token_ids for n in tree.nodes()]
    assert solution.tree_hash == expected.tree_hash

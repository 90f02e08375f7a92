"""Memory that the system refuses is an error that names the option to lower."""

import pytest
import torch

from beamwright.errors import DeviceMemoryError, InputError
from beamwright.models.dense import DenseDecoder
from beamwright.models.load import is_out_of_memory
from beamwright.models.named import NAMED_SHAPES
from beamwright.sections import MemorySettings
from beamwright.solver.memory import (
    ModelBytes,
    plan_memory,
)
from engines import PROBLEM, assert_nothing_allocated

REFUSED = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_memory": "900TB", "schedule": "in-gpu"}, "lower --memory or --kv-memory"),
        ({"host_memory": "900TB", "schedule": "locality"}, "lower --host-memory"),
    ],
)
def test_a_budget_that_no_machine_has(make_solver, options, named):
    with pytest.raises(DeviceMemoryError, match=named):
        make_solver(n=4, **options)


@pytest.mark.parametrize("kind", [MemoryError(), REFUSED, torch.OutOfMemoryError("no")])
def test_a_round_that_is_refused_memory_is_cut_in_half(make_solver, monkeypatch, kind):
    """As on a card: the tree is the same, as long as one beam fits."""
    with make_solver(n=8, width=2) as solver:
        expected = solver.solve(PROBLEM).tree_hash
        real = DenseDecoder.hidden

        def hidden(self, token_ids, *words):
            if len(token_ids) > 8 and words[0][0] != 0:  # the prompt is in one piece
                raise kind
            return real(self, token_ids, *words)

        monkeypatch.setattr(DenseDecoder, "hidden", hidden)
        assert solver.solve(PROBLEM).tree_hash == expected
        assert_nothing_allocated(solver)
        monkeypatch.setattr(DenseDecoder, "hidden", lambda *words: (_ for _ in ()).throw(kind))
        with pytest.raises(DeviceMemoryError):
            solver.solve(PROBLEM)
        assert_nothing_allocated(solver)


def test_other_errors_are_not_taken_for_it():
    assert is_out_of_memory(REFUSED)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_two_numbers_that_contradict_each_other():
    shape = ModelBytes(NAMED_SHAPES["qwen2.5-1.5b"], 2)
    settings = MemorySettings(memory="4GiB", kv_memory="2GiB")
    with pytest.raises(InputError, match=r"--memory 4.0 GiB is less than --kv-memory 2.0 GiB and"):
        plan_memory(settings, shape, None, 4)
    assert plan_memory(settings.model_copy(update={"memory": 8 << 30}), shape, None, 4).kv_bytes

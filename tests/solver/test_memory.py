"""The memory number: how it is spent, what it holds, and what is said where it does not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from beamwright import Solver
from beamwright.config import Settings
from beamwright.errors import DeviceMemoryError, InputError, format_bytes
from beamwright.models.decoder import ROW_MULTIPLE
from beamwright.models.dense import DenseDecoder
from beamwright.models.load import is_out_of_memory
from beamwright.models.named import NAMED_SHAPES, shape_from_text
from beamwright.plan import machines
from beamwright.plan.costs import Storage
from beamwright.plan.machines import DEFAULT_PROFILE, find_profile
from beamwright.sections import MemorySettings
from beamwright.solver import auto_settings, memory
from beamwright.solver.memory import memory_needed, plan_memory
from beamwright.solver.model_bytes import ModelBytes
from engines import PROBLEM, assert_nothing_allocated

GIB = 2**30
BIG = "llama,layers=4,hidden=64,heads=4,kv_heads=4,intermediate=128,vocab=100,context=256"


@pytest.fixture
def generator():
    return ModelBytes(shape_from_text(BIG), 4)


@pytest.fixture
def verifier():
    """A third of the generator's KV per token."""
    small = BIG.replace("layers=4", "layers=2").replace("kv_heads=4", "kv_heads=2")
    return ModelBytes(shape_from_text(small), 4)


def test_kv_memory_is_the_kv_alone_and_goes_by_bytes_per_token(generator, verifier):
    plan = plan_memory(MemorySettings(kv_memory=50_000, memory="1GiB"), generator, None, 16)
    assert (plan.generator_kv_bytes, plan.verifier_kv_bytes, plan.kv_bytes) == (50_000, 0, 50_000)
    plan = plan_memory(MemorySettings(kv_memory=50_000), generator, verifier, 16)
    assert generator.kv_per_token == 4 * verifier.kv_per_token
    assert (plan.generator_kv_bytes, plan.verifier_kv_bytes) == (40_000, 10_000)


@pytest.mark.parametrize("parts", [1, 3])
def test_memory_is_everything(generator, verifier, parts):
    """Verifiers that run at a time share one copy of the weights; each computes, and has KV."""
    several, settings = replace(verifier, parts=parts), MemorySettings(memory="64MiB")
    plan = plan_memory(settings, generator, several, 16)
    activations = [generator.activations(16), parts * verifier.activations(16)]
    beside = generator.weights + verifier.weights
    beside += max(activations) if parts == 1 else sum(activations)
    assert plan.kv_bytes == (64 * 1024**2 - beside) // 2
    needed = memory_needed((generator, several), (50_000, 20_000), 16)
    plan = plan_memory(MemorySettings(memory=needed), generator, several, 16)
    assert plan.generator_kv_bytes >= 50_000
    assert plan.verifier_kv_bytes // parts >= 20_000


def test_memory_that_leaves_nothing_for_kv_says_where_it_goes(generator):
    with pytest.raises(InputError, match="nothing is left for KV") as caught:
        plan_memory(MemorySettings(memory=generator.weights), generator, None, 16)
    for number in (generator.weights, generator.activations(16)):
        assert format_bytes(number) in str(caught.value)
    assert "--memory" in str(caught.value)


@pytest.mark.parametrize("verifier_storage", [Storage.PLAIN, Storage.INT8])
def test_7b_in_int4_and_its_verifier_fit_a_12_gb_card(verifier_storage):
    sizes = [NAMED_SHAPES[name] for name in ("qwen2.5-7b", "qwen2.5-1.5b")]
    settings = MemorySettings(memory="12GB")
    verifier = ModelBytes(sizes[1], 2, verifier_storage)
    with pytest.raises(InputError, match="nothing is left for KV"):
        plan_memory(settings, ModelBytes(sizes[0], 2), verifier, 16)
    generator = ModelBytes(sizes[0], 2, Storage.INT4)
    plan = plan_memory(settings, generator, verifier, 16)
    assert 5.8e9 < generator.weights < 5.9e9
    assert plan.generator_kv_bytes // generator.kv_per_token > 10_000
    assert plan.verifier_kv_bytes // verifier.kv_per_token > 10_000


def test_the_host_tier_is_half_of_the_memory_that_there_is(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CONTAINER_LIMIT", limit)
    whole = memory.host_kv_bytes(Settings.build())
    for written in ("max", ""):
        limit.write_text(written)
        assert memory.host_kv_bytes(Settings.build()) == whole
    limit.write_text("1000000\n")
    assert memory.host_kv_bytes(Settings.build()) == 500_000
    assert memory.host_kv_bytes(Settings.build(host_memory="3GiB")) == 3 * GIB
    limit.write_text(str(2**45))
    monkeypatch.setattr(memory.os, "sysconf", lambda name: 2**22)
    assert memory.host_kv_bytes(Settings.build()) == 2**43
    assert memory.host_kv_bytes(Settings.build(device="cuda")) == 16 * GIB, "pinned"


@pytest.mark.parametrize("n", [4, 1000])
@pytest.mark.parametrize("step_tokens", [None, 8, 256])
def test_what_is_needed_is_the_inverse_of_the_plan(generator, n, step_tokens):
    for kv_bytes in (100_000, 7_654_321):
        number = memory_needed((generator, None), (kv_bytes, 0), n, step_tokens=step_tokens)
        for less, fits in ((0, True), (4, False)):
            settings = MemorySettings(memory=number - less)
            plan = plan_memory(settings, generator, None, n, step_tokens=step_tokens)
            assert (plan.kv_bytes >= kv_bytes) is fits


def test_a_card_s_free_memory_is_the_default(generator):
    free = 2**26
    left = int(0.9 * free) - generator.activations(16)
    found = plan_memory(MemorySettings(), generator, None, 16, free_bytes=free)
    assert found.kv_bytes == left // 2
    in_place = plan_memory(MemorySettings(), generator, None, 16, free_bytes=free, in_place=True)
    assert in_place.kv_bytes == left - generator.cuda_graph_bytes - generator.partials(16)
    for given, beside in (({"memory": "64MiB"}, 2**26 // 50), ({"kv_memory": 1000}, 0)):
        settings = MemorySettings(**given)
        asked = plan_memory(settings, generator, None, 16, free_bytes=free)
        plain = plan_memory(settings, generator, None, 16)
        assert 0 <= plain.kv_bytes - beside // 2 - asked.kv_bytes <= 1, "libraries have some"
    with pytest.raises(InputError, match=r"activations take about .*, the card has 1000 B free"):
        plan_memory(MemorySettings(), generator, None, 16, free_bytes=1000)


@pytest.mark.parametrize(
    ("name", "total", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 85_000_000_000, 3350e9),
        ("NVIDIA GeForce RTX 3060", 12_600_000_000, 360e9),
        ("Some Card", 5 * GIB, find_profile(DEFAULT_PROFILE).device_bandwidth),
    ],
)
def test_a_card_is_chosen_for_by_its_own_data_sheet(monkeypatch, name, total, bandwidth):
    card = SimpleNamespace(name=name, total_memory=total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    measured = replace(find_profile("epyc-2core"), name="measured")
    monkeypatch.setattr(machines, "find_profile", {"measured": measured}.__getitem__)
    found = auto_settings.machine_profile("cuda:0")
    assert (found.device_bandwidth, found.device_memory_bytes) == (bandwidth, total)
    assert auto_settings.machine_profile("cpu") == measured


MUCH_KV = "llama,layers=2,hidden=32,heads=8,kv_heads=8,head_dim=64,intermediate=32,vocab=64"


@pytest.mark.parametrize(("n", "step_tokens"), [(24, 48), (8, 80)])
def test_a_search_that_fills_its_kv_stays_within_the_number(n, step_tokens):
    """By what is counted: weights, KV of the device, and attention's working copies, tails too."""
    memory = 14 * 1024**2
    how = {"search": "best-of-n", "choose": "majority", "ignore_eos": True, "dtype": "float32"}
    lengths = {"step_tokens": step_tokens, "max_tokens": 2 * step_tokens}
    model = f"random:{MUCH_KV},context=512"
    with Solver(model=model, verifier="none", n=n, memory=memory, **how, **lengths) as solver:
        found = solver.synthetic(32)
        plan, sizes = solver._machinery.plan, ModelBytes(shape_from_text(model[7:]), 4)
        least_rows = solver.generator.decoder.least_rows
    assert found.kv.device_peak_bytes > 0.9 * plan.kv_bytes
    used = sizes.weights + found.kv.device_peak_bytes + found.kv.scratch_peak_bytes
    # Where one path's bits are another's in eight rows only, eight tails are more than the number.
    assert used < 1.05 * memory or (n == 8 and least_rows == ROW_MULTIPLE)
    with Solver(model=model, verifier="none", n=n, **how, **lengths) as solver:
        assert solver.synthetic(32).tree_hash == found.tree_hash


def test_a_hybrid_has_as_many_rows_at_a_time_as_states(verifier):
    hybrid = ModelBytes(NAMED_SHAPES["qwen3.5-27b"], 2, Storage.INT4)
    settings = MemorySettings(memory="24GB")
    for given, free, rows in ((settings, None, 32), (MemorySettings(), 5 * GIB, 34)):
        how = {"free_bytes": free, "in_place": True}
        few, many = (plan_memory(given, hybrid, None, n, **how) for n in (rows, 4096))
        assert few == many, "more rows than that wait"
    split = plan_memory(MemorySettings(kv_memory="8GiB"), hybrid, verifier, 16)
    assert split.verifier_kv_bytes < 8 * GIB // 500, "a state counts as its row's tokens"
    beside = memory_needed((hybrid, None), (GIB, 0), 16, in_place=True)
    plan = plan_memory(MemorySettings(memory=beside), hybrid, None, 16, in_place=True)
    assert plan.kv_bytes >= GIB
    needs = memory.longest_path_bytes(Settings(), [hybrid], 100)
    assert needs[0] >= 2 * hybrid.state_bytes, "its own, and its parent's"


# --- what is refused --------------------------------------------------------------------------


def test_two_numbers_that_contradict_each_other():
    shape = ModelBytes(NAMED_SHAPES["qwen2.5-1.5b"], 2)
    settings = MemorySettings(memory="4GiB", kv_memory="2GiB")
    with pytest.raises(InputError, match=r"--memory too small: --kv-memory is 2.0 GiB and"):
        plan_memory(settings, shape, None, 4)
    assert plan_memory(settings.model_copy(update={"memory": 8 << 30}), shape, None, 4).kv_bytes


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_memory": "900TB", "schedule": "in-gpu"}, "Lower --memory or --kv-memory"),
        ({"host_memory": "900TB", "schedule": "locality"}, "Lower --host-memory"),
    ],
)
def test_a_budget_that_no_machine_has(make_solver, options, named):
    with pytest.raises(DeviceMemoryError, match=named):
        make_solver(n=4, **options)


REFUSED = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


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
        monkeypatch.setattr(DenseDecoder, "hidden", lambda *words: (_ for _ in ()).throw(kind))
        with pytest.raises(DeviceMemoryError):
            solver.solve(PROBLEM)
        assert_nothing_allocated(solver)


@pytest.mark.parametrize("other", [RuntimeError("shape mismatch"), ValueError("out of memory")])
def test_other_errors_are_not_taken_for_it(other):
    assert not is_out_of_memory(other)

import pytest

from beamwright.config import MemorySettings, Settings
from beamwright.cost import Storage
from beamwright.errors import InputError, format_bytes
from beamwright.models.named_shapes import NAMED_SHAPES, shape_from_text
from beamwright.solver import tiers
from beamwright.solver.memory import DEFAULT_KV_BYTES, ModelBytes, plan_memory

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


def test_sizes_of_one_model(generator):
    assert generator.weights == shape_from_text(BIG).num_parameters * 4
    assert generator.kv_per_token == 2 * 4 * 64 * 4
    assert generator.activations(100_000) > generator.activations(1)


def test_kv_memory_is_the_kv_alone(generator):
    plan = plan_memory(MemorySettings(kv_memory=1000, memory="1GiB"), generator, None, 16)
    assert (plan.generator_kv_bytes, plan.verifier_kv_bytes, plan.kv_bytes) == (1000, 0, 1000)


def test_memory_is_everything(generator, verifier):
    settings = MemorySettings(memory="64MiB")
    plan = plan_memory(settings, generator, verifier, 16)
    weights = generator.weights + verifier.weights
    activations = max(model.activations(16) for model in (generator, verifier))
    assert plan.kv_bytes == (64 * 1024**2 - weights - activations) // 2


def test_the_two_kv_budgets_share_by_bytes_per_token(generator, verifier):
    plan = plan_memory(MemorySettings(kv_memory=50_000), generator, verifier, 16)
    assert generator.kv_per_token == 4 * verifier.kv_per_token
    assert (plan.generator_kv_bytes, plan.verifier_kv_bytes) == (40_000, 10_000)


def test_without_a_number_there_is_a_default(generator):
    assert plan_memory(MemorySettings(), generator, None, 16).kv_bytes == DEFAULT_KV_BYTES


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
    generator = ModelBytes(sizes[0], 2, Storage.INT4_TILED)
    plan = plan_memory(settings, generator, verifier, 16)
    assert 6.2e9 < generator.weights < 6.3e9
    assert plan.generator_kv_bytes // generator.kv_per_token > 10_000
    assert plan.verifier_kv_bytes // verifier.kv_per_token > 10_000


def test_weights_that_are_turned_back_need_room(generator):
    quantised = ModelBytes(generator.shape, 4, Storage.INT8)
    largest = 2 * 128 * 64 * 4
    assert quantised.activations(16) == generator.activations(16) + largest


def test_the_host_tier_is_half_of_the_memory_that_there_is(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(tiers, "_CONTAINER_LIMIT", limit)
    whole = tiers.host_kv_bytes(Settings.build())
    for written in ("max", ""):
        limit.write_text(written)
        assert tiers.host_kv_bytes(Settings.build()) == whole
    limit.write_text("1000000\n")
    assert tiers.host_kv_bytes(Settings.build()) == 500_000
    assert tiers.host_kv_bytes(Settings.build(host_memory="3GiB")) == 3 * GIB
    limit.write_text(str(2**45))
    monkeypatch.setattr(tiers.os, "sysconf", lambda name: 2**22)
    assert tiers.host_kv_bytes(Settings.build()) == 2**43
    assert tiers.host_kv_bytes(Settings.build(device="cuda")) == 16 * GIB, "pinned at once"

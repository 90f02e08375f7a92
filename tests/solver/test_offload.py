"""Which layers live outside the device: only if weights do not fit, and no more than is needed."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from beamwright.errors import InputError
from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import Roofline, Storage, projection_bytes
from beamwright.plan.machines import find_profile
from beamwright.plan.times import decode_costs
from beamwright.plan.workload import Workload
from beamwright.sections import MemorySettings
from beamwright.solver.memory import plan_memory
from beamwright.solver.model_bytes import ModelBytes
from beamwright.solver.offload import choose_offload

GIB = 2**30
GENERATOR, VERIFIER = (ModelBytes(NAMED_SHAPES[f"qwen2.5-{size}"], 2) for size in ("7b", "1.5b"))
LAYERS = GENERATOR.shape.layers
WORKLOAD = Workload(16, 4, 128, 1024, 64)
RULES = {"in_place": True, "free_bytes": 24 * GIB}


def chosen(memory, *models, workload=WORKLOAD, **settings):
    settings = MemorySettings(memory=int(memory), **settings)
    return choose_offload(settings, models, workload, find_profile("rtx-3060"), RULES)


def counts(*args, **kwargs):
    """Numbers of offloaded layers, by model."""
    return [
        len(each.offloaded.numbers) if each.offloaded else 0 for each in chosen(*args, **kwargs)
    ]


def plan_of(memory, models, workload=WORKLOAD):
    generator, verifier = [*models, None][:2]
    return plan_memory(
        MemorySettings(memory=memory), generator, verifier, workload.num_beams, **RULES
    )


def test_layers_leave_the_device_only_if_weights_do_not_fit():
    assert counts(17 * GIB, GENERATOR) == [0]
    assert counts(13 * GIB, GENERATOR)[0] > 0
    assert counts(13 * GIB, GENERATOR, weights_home="device") == [0]
    assert counts(17 * GIB, GENERATOR, VERIFIER, weights_home="disk") == [0, LAYERS]


def test_what_cannot_fit_is_refused_as_before():
    whole = (GENERATOR, VERIFIER)
    assert chosen(3 * GIB, *whole) == [*whole]
    with pytest.raises(InputError, match="nothing is left for KV"):
        plan_of(3 * GIB, whole)
    assert counts(2 * GIB, GENERATOR) == [0]


@pytest.mark.parametrize("models", [(GENERATOR,), (GENERATOR, VERIFIER)], ids=len)
@pytest.mark.parametrize("beams", [4, 64])
def test_less_memory_never_means_fewer_offloaded_layers(models, beams):
    workload = Workload(beams, 4, 128, 1024, 64)
    weights = sum(model.weights for model in models)
    shares = [step / 20 for step in range(26, 7, -1)]
    found = [counts(share * weights, *models, workload=workload) for share in shares]
    for more, fewer in pairwise(found):
        assert more <= fewer or more[1:] < fewer[1:], "unless the verifier leaves in their place"
    assert found[0] == [0] * len(models)
    assert all(found[-1])
    assert all(own in (0, VERIFIER.shape.layers) for _, *rest in found for own in rest)


def test_more_rows_leave_more_memory_for_kv():
    found = [
        sum(counts(10 * GIB, GENERATOR, workload=Workload(beams, 4, 128, 2048, 64)))
        for beams in (4, 64, 256)
    ]
    assert found == sorted(found)
    assert found[0] < found[-1]


def seconds_of(memory, model):
    """Predicted seconds of a search; None if nothing is left for KV."""
    try:
        kv_bytes = plan_of(memory, [model]).kv_bytes
    except InputError:
        return None
    totals = decode_costs(WORKLOAD, Roofline(model.costs, find_profile("rtx-3060")), kv_bytes)
    return inf if totals is None else totals.decode_s + totals.stall_s


@pytest.mark.parametrize("memory", [13 * GIB, 10 * GIB, 7 * GIB])
def test_the_number_of_layers_with_the_fastest_search_is_chosen(memory):
    (model,) = chosen(memory, GENERATOR)
    tried = [seconds_of(memory, GENERATOR.with_offloaded(n)) for n in range(3, LAYERS + 1)]
    assert seconds_of(memory, model) == min(each for each in tried if each is not None)


def test_without_room_for_one_beam_of_the_expected_search_kv_gets_the_most():
    """The search may be shorter than expected."""
    long = Workload(4, 2, 8192, 20_000, 64)
    tight = plan_of(6 * GIB, [GENERATOR.with_offloaded(LAYERS)]).kv_bytes
    assert tight < long.num_beams * 28_000 * GENERATOR.kv_per_token
    memory = 6 * GIB - tight + 64 * 2**20
    assert counts(memory, GENERATOR, workload=long) == [LAYERS]


def test_parallel_verifiers_keep_their_weights():
    parallel = ModelBytes(VERIFIER.shape, 2, parts=2)
    assert counts(15 * GIB, GENERATOR, VERIFIER)[1] == VERIFIER.shape.layers
    assert counts(15 * GIB, GENERATOR, parallel)[1] == 0


@pytest.mark.parametrize("count", [3, 5, 14, LAYERS])
def test_layers_are_evenly_spread(count):
    numbers = GENERATOR.with_offloaded(count).offloaded.numbers
    assert len(numbers) == len(set(numbers)) == count
    gaps = [after - before for before, after in pairwise((*numbers, LAYERS + numbers[0]))]
    assert max(gaps) - min(gaps) <= 1


def test_bytes_of_offloaded_layers_add_up():
    moved = GENERATOR.with_offloaded(LAYERS)
    layer = moved.offloaded.pass_bytes // LAYERS
    table = 2 * GENERATOR.shape.vocab * GENERATOR.shape.hidden
    assert moved.offloaded.buffer_bytes == 2 * layer
    assert moved.weights == GENERATOR.weights - (LAYERS - 2) * layer - table
    assert moved.all_weights == GENERATOR.weights
    assert moved.costs.offloaded_bytes == moved.offloaded.pass_bytes
    few = GENERATOR.with_offloaded(2)
    assert few.weights == GENERATOR.weights - table, "two buffers hold two layers"
    assert moved.with_offloaded(0) == GENERATOR


def test_a_table_that_stays_in_its_file_is_not_taken_off_twice():
    """The sizes of a file in blocks are those of what is read into memory."""
    blocks = replace(GENERATOR.shape, blocks=(4 * GIB, 0, GIB // 2), tied=False)
    model = ModelBytes(blocks, 4, Storage.BLOCKS).with_offloaded(LAYERS)
    assert model.offloaded.home_bytes == model.offloaded.pass_bytes
    assert model.weights >= GIB // 2, "the LM head"


def test_layers_of_a_hybrid_count_with_their_own_sizes():
    """Every second layer is three times as large as the others."""
    shape = NAMED_SHAPES["qwen3.5-9b"]
    built = replace(shape.built, by_layer=(3, 1) * (shape.layers // 2))
    model = ModelBytes(replace(shape, built=built), 2)
    large, small = (round(projection_bytes(shape, 2) * n / 2 / shape.layers) for n in (3, 1))
    half, whole = (model.with_offloaded(n).offloaded for n in (shape.layers // 2, shape.layers))
    assert half.home_bytes == pytest.approx(shape.layers // 2 * large)
    assert half.buffer_bytes == pytest.approx(2 * large)
    assert whole.buffer_bytes == pytest.approx(large + small)

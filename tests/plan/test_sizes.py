import pytest

from beamwright.models.shape import NAMED_SHAPES
from beamwright.plan.costs import (
    ModelCosts,
    Roofline,
    Storage,
    conversion_bytes,
    matrix_bytes,
    product_scratch_bytes,
    storage_of,
    weight_bytes,
)


@pytest.fixture
def qwen():
    return NAMED_SHAPES["qwen2.5-7b"]


def test_a_matrix_with_its_scales():
    assert matrix_bytes(10, 64, 4, Storage.PLAIN) == 10 * 64 * 4
    assert matrix_bytes(10, 64, 4, Storage.INT8) == 10 * (64 + 4 + 1)
    assert matrix_bytes(10, 64, 4, Storage.INT4) == 10 * (32 + 2 * 4)
    assert matrix_bytes(10, 65, 2, Storage.INT4) == 10 * 2 * (32 + 2 * 2)
    assert matrix_bytes(10, 65, 2, Storage.INT4_TILED) == 16 * 16 * (32 + 2 * 2)


def test_int4_is_the_kernels_where_there_is_one():
    assert storage_of("int4", has_int4_kernel=True) is Storage.INT4_TILED
    assert storage_of("int4", has_int4_kernel=False) is Storage.INT4
    assert storage_of("int8", has_int4_kernel=True) is Storage.INT8
    assert storage_of("auto", has_int4_kernel=True) is Storage.PLAIN


def test_only_projections_shrink(qwen):
    embeddings = 2 * qwen.vocab * qwen.hidden
    for storage in (Storage.INT8, Storage.INT4, Storage.INT4_TILED):
        found = weight_bytes(qwen, 2, storage)
        assert 2 * embeddings < found < weight_bytes(qwen, 2)
    assert weight_bytes(qwen, 2) == 2 * qwen.num_parameters
    in_layers = qwen.num_parameters - embeddings
    bits = 8 * (weight_bytes(qwen, 2, Storage.INT4) - 2 * embeddings) / in_layers
    assert bits == pytest.approx(4.5, abs=0.01)


def test_weights_that_are_turned_back_cost_traffic_and_room(qwen):
    for storage in (Storage.PLAIN, Storage.INT4_TILED):
        assert conversion_bytes(qwen, 2, storage) == 0
        assert product_scratch_bytes(qwen, 2, storage) == 0
    in_layers = qwen.layers * sum(rows * columns for rows, columns in qwen.projections)
    for storage in (Storage.INT8, Storage.INT4):
        assert conversion_bytes(qwen, 2, storage) == 2 * 2 * in_layers
    assert product_scratch_bytes(qwen, 2, Storage.INT8) == 2 * 18944 * 3584 * 2
    assert 0 < product_scratch_bytes(qwen, 2, Storage.INT4) < 100 * 2**20


def test_a_step_reads_what_is_stored_and_what_is_turned_back(qwen, gpu):
    seconds = {
        storage: Roofline(ModelCosts.of(qwen, 2, storage), gpu).decode_step(8, 1000, 8000)
        for storage in Storage
    }
    assert seconds[Storage.INT4_TILED] < seconds[Storage.PLAIN] < seconds[Storage.INT4]
    assert seconds[Storage.INT4] < seconds[Storage.INT8]
    saved = weight_bytes(qwen, 2) - weight_bytes(qwen, 2, Storage.INT4_TILED)
    rate = gpu.device_bandwidth * gpu.bandwidth_share
    assert seconds[Storage.PLAIN] - seconds[Storage.INT4_TILED] == pytest.approx(saved / rate)

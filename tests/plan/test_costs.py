"""Bytes of models in any precision, and seconds of their operations, by hand."""

from dataclasses import replace

import pytest

from beamwright.models.named import NAMED_SHAPES
from beamwright.plan import costs
from beamwright.plan.machines import find_profile
from beamwright.protocols import Direction


@pytest.fixture
def roofline(opt, gpu):
    return costs.Roofline(opt, gpu)


def rises(seconds):
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


@pytest.mark.parametrize(("rows", "read", "seen"), [(8, 10_000, 10_000), (4096, 0, 8192)])
def test_a_step_is_the_longer_of_bytes_and_flops_plus_launches(
    roofline, opt, gpu, rows, read, seen
):
    """Few rows are bound by memory, many by compute."""
    read_bytes = opt.weight_bytes + read * opt.kv_bytes_per_token
    memory_s = read_bytes / (gpu.device_bandwidth * gpu.bandwidth_share)
    flops = 2 * opt.num_parameters * rows + 4 * 32 * 32 * 128 * seen
    compute_s = flops / (gpu.flops * gpu.flops_share)
    assert (memory_s > compute_s) == (rows == 8)
    launches_s = 32 * gpu.decode_ops_per_layer * gpu.launch_s
    expected = max(memory_s, compute_s) + launches_s
    assert roofline.decode_step_s(rows, read, seen) == pytest.approx(expected)


def test_a_pass_reads_and_writes_the_state_of_every_row(gpu):
    """Three of four layers keep one, and attend to nothing."""
    model = costs.ModelCosts.of(NAMED_SHAPES["qwen3.5-27b"], 2)
    assert (model.recurrent_layers, model.state_bytes) == (48, 147.75 * 2**20)
    hybrid, plain = costs.Roofline(model, gpu), costs.Roofline(replace(model, state_bytes=0), gpu)
    of_a_row = 2 * model.state_bytes / (gpu.device_bandwidth * gpu.bandwidth_share)
    assert hybrid.decode_step_s(8, 0, 0) - plain.decode_step_s(8, 0, 0) == pytest.approx(
        8 * of_a_row
    )
    assert hybrid.pass_costs().seconds(8) == pytest.approx(hybrid.decode_step_s(8, 0, 0))
    # A prompt's state is read and written once for each of its chunks.
    assert hybrid.prefill_s(512) <= plain.prefill_s(512) + 2.01 * of_a_row
    attended = (
        hybrid.pass_parts_s(1, 0, 1000, costs.Layout.TREE)[1]
        - hybrid.pass_parts_s(1, 0, 0, costs.Layout.TREE)[1]
    )
    assert attended == pytest.approx(4 * 16 * 24 * 256 * 1000 / (gpu.flops * gpu.flops_share))


def test_more_work_never_takes_less_time(roofline):
    for layout in costs.Layout:
        rises([roofline.decode_step_s(64, kv, kv, layout) for kv in range(0, 10**5, 10**4)])
        rises([roofline.decode_step_s(rows, 1000, 1000, layout) for rows in (1, 64, 512, 4096)])
    rises([roofline.prefill_s(tokens) for tokens in (1, 128, 1024, 4096)])
    by_context = [roofline.prefill_s(1024, context) for context in (0, 1024, 8192)]
    rises(by_context)
    assert by_context[0] == roofline.prefill_s(1024)


def test_transfers_by_direction_and_piece(opt, gpu):
    slow_back = costs.Roofline(
        opt, replace(gpu, d2h_bandwidth=gpu.h2d_bandwidth / 2, link_share=1.0)
    )
    to_device = slow_back.transfer_s(15.75e9, 0, Direction.H2D)
    assert to_device == pytest.approx(1.0)
    assert slow_back.transfer_s(15.75e9, 0, Direction.D2H) == pytest.approx(2.0)
    pieces = slow_back.transfer_s(15.75e9, 1000, Direction.H2D)
    assert pieces - to_device == pytest.approx(1000 * gpu.copy_launch_s)


@pytest.fixture
def qwen():
    return NAMED_SHAPES["qwen2.5-7b"]


def test_a_matrix_with_its_scales():
    assert costs.matrix_bytes(10, 64, 4, costs.Storage.PLAIN) == 10 * 64 * 4
    assert costs.matrix_bytes(10, 64, 4, costs.Storage.INT8) == 10 * (64 + 2 * 4)
    assert costs.matrix_bytes(10, 64, 4, costs.Storage.INT4) == 10 * (32 + 2 * 2)
    assert costs.matrix_bytes(10, 65, 2, costs.Storage.INT4) == 10 * 2 * (32 + 2 * 2)


def test_a_quantised_checkpoint_stays_as_it_is_unless_asked():
    assert costs.storage_of("int4", is_packed=True) is costs.Storage.INT4
    assert costs.storage_of("auto", is_packed=True) is costs.Storage.STORED
    assert costs.storage_of("auto") is costs.Storage.PLAIN


def test_only_projections_shrink(qwen):
    embeddings = 2 * qwen.vocab * qwen.hidden
    for storage in (costs.Storage.INT8, costs.Storage.INT4):
        found = costs.weight_bytes(qwen, 2, storage)
        assert 2 * embeddings < found < costs.weight_bytes(qwen, 2)
    assert costs.weight_bytes(qwen, 2) == 2 * qwen.num_parameters
    in_layers = qwen.num_parameters - embeddings
    bits = 8 * (costs.weight_bytes(qwen, 2, costs.Storage.INT4) - 2 * embeddings) / in_layers
    assert bits == pytest.approx(4.5, abs=0.01)


def test_weights_that_are_turned_back_cost_traffic_and_room(qwen):
    assert (
        costs.conversion_bytes(qwen, 2, costs.Storage.PLAIN)
        == costs.matmul_scratch_bytes(qwen)
        == 0
    )
    in_layers = sum(rows * columns * count for rows, columns, count in qwen.matrices)
    for storage in (costs.Storage.INT8, costs.Storage.INT4):
        assert costs.conversion_bytes(qwen, 2, storage) == 2 * 2 * in_layers
        assert (
            2 * costs.DEQUANTISED_VALUES < costs.matmul_scratch_bytes(qwen, storage) < 100 * 2**20
        )


def test_kernels_read_few_rows_weights_as_they_are_stored(qwen):
    half, wide = (costs.ModelCosts.of(qwen, size, costs.Storage.INT4) for size in (2, 4))
    few, many = (
        half.weight_traffic_bytes(tokens)
        for tokens in (costs.QUANTISED_GEMM_ROWS, costs.QUANTISED_GEMM_ROWS + 1)
    )
    assert few == half.weight_bytes < many == few + half.conversion_bytes
    assert wide.weight_traffic_bytes(1) == wide.weight_bytes + wide.conversion_bytes


def test_where_a_library_multiplies_codes_its_rates_count(qwen):
    plain = find_profile("epyc-2core")
    fast = replace(plain, coded_bandwidth=plain.device_bandwidth / 2, coded_flops=9 * plain.flops)
    coded = costs.ModelCosts.of(qwen, 4, costs.library_storage(costs.Storage.INT8, qwen))
    one, *_ = costs.Roofline(coded, fast).pass_parts_s(1, 0, 0, costs.Layout.TREE)
    assert one == pytest.approx(2 * coded.weight_bytes / plain.device_bandwidth)
    _, many, launch_s = costs.Roofline(coded, fast).pass_parts_s(64, 0, 0, costs.Layout.TREE)
    assert many == pytest.approx(2 * 64 * qwen.num_parameters / (9 * plain.flops))
    assert launch_s == plain.launch_s
    assert costs.Roofline(coded, plain).pass_parts_s(64, 0, 0, costs.Layout.TREE)[2] > 9 * launch_s
    kept = costs.ModelCosts.of(qwen, 4)
    assert costs.Roofline(kept, fast).pass_parts_s(1, 0, 0, costs.Layout.TREE) == (
        costs.Roofline(kept, plain).pass_parts_s(1, 0, 0, costs.Layout.TREE)
    )

from dataclasses import replace

import pytest

from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.protocols import Direction


@pytest.fixture
def roofline(opt, gpu):
    return Roofline(opt, gpu)


def test_costs_of_a_shape_by_its_attributes(opt):
    class Shape:
        layers, heads, head_dim, num_parameters = 32, 32, 128, 6_658_473_984

        def kv_bytes_per_token(self, element_bytes):
            return 2 * 32 * 32 * 128 * element_bytes

    assert ModelCosts.of(Shape(), 2) == opt
    assert ModelCosts.of(Shape(), 4).weight_bytes == 2 * opt.weight_bytes


def test_a_memory_bound_step_is_weights_and_kv_over_bandwidth_plus_launches(roofline, opt, gpu):
    launches_s = 32 * gpu.decode_ops_per_layer * gpu.launch_s
    read_bytes = opt.weight_bytes + 10_000 * opt.kv_bytes_per_token
    floor_s = read_bytes / (gpu.device_bandwidth * gpu.bandwidth_share)
    assert roofline.decode_step(8, 10_000, 10_000) == pytest.approx(floor_s + launches_s)
    assert roofline.decode_layer(8, 10_000, 10_000) * 32 == pytest.approx(floor_s + launches_s)


def test_a_compute_bound_step_is_flops_over_the_rate(roofline, opt, gpu):
    rows, seen = 4096, 8192
    flops = 2 * opt.num_parameters * rows + 4 * 32 * 32 * 128 * seen
    launches_s = 32 * gpu.decode_ops_per_layer * gpu.launch_s
    expected = flops / (gpu.flops * gpu.flops_share) + launches_s
    assert roofline.decode_step(rows, 0, seen) == pytest.approx(expected)


def test_copies_cost_more_than_reading_shared_kv(roofline):
    shared = roofline.decode_step(64, 9_000, 70_000)
    copies = roofline.decode_step(64, 70_000, 70_000, Layout.DENSE)
    once = roofline.decode_step(64, 70_000, 70_000, Layout.TREE)
    assert shared < once < copies


def test_more_work_never_takes_less_time(roofline):
    for layout in Layout:
        by_kv = [roofline.decode_step(64, kv, kv, layout) for kv in range(0, 10**5, 10**4)]
        by_rows = [roofline.decode_step(rows, 1000, 1000, layout) for rows in (1, 64, 512, 4096)]
        assert by_kv == sorted(by_kv)
        assert by_rows == sorted(by_rows)
        assert by_kv[0] < by_kv[-1]
        assert by_rows[0] < by_rows[-1]
    by_tokens = [roofline.prefill(tokens) for tokens in (1, 128, 1024, 4096)]
    by_context = [roofline.verify(1024, context) for context in (0, 1024, 8192)]
    assert by_tokens == sorted(by_tokens)
    assert by_context == sorted(by_context)
    assert by_context[0] == roofline.prefill(1024) < by_context[-1]


def test_a_better_machine_is_never_slower(opt, gpu):
    base = Roofline(opt, gpu).decode_step(64, 70_000, 70_000)
    for name in ("device_bandwidth", "flops"):
        better = replace(gpu, **{name: 2 * getattr(gpu, name)})
        assert Roofline(opt, better).decode_step(64, 70_000, 70_000) <= base
    assert Roofline(opt, replace(gpu, launch_s=1e-6)).decode_step(64, 70_000, 70_000) < base


def test_transfers_by_direction_and_piece(opt, gpu):
    slow_back = Roofline(opt, replace(gpu, d2h_bandwidth=gpu.h2d_bandwidth / 2, link_share=1.0))
    to_device = slow_back.transfer(15.75e9, 0, Direction.H2D)
    assert to_device == pytest.approx(1.0)
    assert slow_back.transfer(15.75e9, 0, Direction.D2H) == pytest.approx(2.0)
    pieces = slow_back.transfer(15.75e9, 1000, Direction.H2D)
    assert pieces - to_device == pytest.approx(1000 * gpu.copy_launch_s)

"""Sparse decoding with KV on the host: 64 beams on an RTX 4090 in sixteen lanes, 16 bits."""

from dataclasses import replace

import pytest

from beamwright.models.shape import NAMED_SHAPES
from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.machines import find_profile
from beamwright.plan.sparse import Host, Scored, SparseLoad, host_ranks
from beamwright_lab.studies.sparse import device_bytes, full_seconds

CARD = replace(find_profile("rtx-4090-x16"), launch_s=1e-12)
SHAPE = NAMED_SHAPES["llama-3.1-8b"]
ROOFLINE = Roofline(ModelCosts.of(SHAPE, 2), CARD)
BUDGET = 22.7e9 - ROOFLINE.model.weight_bytes
APART = SparseLoad(64, 4096, 512)
TREE = replace(APART, shared=0.12, selected_shared=0.4)


@pytest.mark.parametrize(
    ("load", "full", "keys", "bounds"),
    [
        (APART, (0.15, 0.55, 1.11), (0.43, 1.7, 3.4), (0.067, 0.215, 0.43)),
        (TREE, (0.024, 0.075, 0.13), (0.07, 0.27, 0.55), (0.0266, 0.0266, 0.0515)),
    ],
)
def test_seconds_per_token_at_4k_16k_and_32k(load, full, keys, bounds):
    for i, context in enumerate((4096, 16384, 32768)):
        case = replace(load, context=context)
        found_s, groups = full_seconds(ROOFLINE, case, BUDGET, 32)
        assert found_s == pytest.approx(full[i], rel=0.03)
        assert groups == pytest.approx(131072 * case.union / BUDGET, abs=1)
        for scored, expected in ((Scored.HOST_KEYS, keys), (Scored.HOST_BOUNDS, bounds)):
            ranks = host_ranks(ROOFLINE, SHAPE, case, scored, Host())
            assert ranks.ideal_s == pytest.approx(expected[i], rel=0.03)


def test_scoring_in_the_host_s_memory_loses_and_bounds_win_where_several_groups_are_needed():
    wide = replace(APART, context=16384)
    full_s, groups = full_seconds(ROOFLINE, wide, BUDGET, 32)
    assert groups == 21
    seconds = {
        scored: host_ranks(ROOFLINE, SHAPE, wide, scored, Host()).ideal_s for scored in Scored
    }
    assert full_s / seconds[Scored.HOST_BOUNDS] == pytest.approx(2.6, abs=0.05)
    assert seconds[Scored.HOST_KEYS] > full_s
    tree = replace(TREE, context=32768)
    full_s, _ = full_seconds(ROOFLINE, tree, BUDGET, 32)
    device_s = host_ranks(ROOFLINE, SHAPE, tree, Scored.DEVICE_BOUNDS, Host()).ideal_s
    assert full_s / device_s == pytest.approx(4.9, abs=0.1)


def test_where_one_group_fits_there_is_little_to_gain():
    full_s, groups = full_seconds(ROOFLINE, TREE, BUDGET, 32)
    assert groups == 1
    resident_s = host_ranks(ROOFLINE, SHAPE, TREE, Scored.ALL_ON_DEVICE, Host()).ideal_s
    assert 1 < full_s / resident_s < 1.2


def test_nothing_is_scored_where_nothing_has_to_be():
    ranks = host_ranks(ROOFLINE, SHAPE, APART, None, Host())
    assert (ranks.cache_s, ranks.up_s) == (0.0, 0.0)
    assert ranks.down_s == host_ranks(ROOFLINE, SHAPE, APART, Scored.HOST_KEYS, Host()).down_s


def test_what_the_device_holds():
    assert device_bytes(1, APART, Scored.HOST_KEYS) == 64 * 512
    assert device_bytes(1, APART, Scored.DEVICE_BOUNDS) == 64 * (512 + 256)
    assert device_bytes(1, APART, Scored.ALL_ON_DEVICE) == 64 * (4096 + 256)


def test_one_path_that_does_not_fit_goes_by_layers():
    load = SparseLoad(2, 100_000, 512)
    seconds, groups = full_seconds(ROOFLINE, load, 10e9, 32)
    assert groups == 0
    assert seconds == pytest.approx((200_000 * 131072 - 10e9) / (31.5e9 * 0.82))

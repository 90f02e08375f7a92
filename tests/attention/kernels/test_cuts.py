"""Where a path is cut depends on nothing but the path."""

import random

import pytest

from beamwright.attention.kernels.worklist import Cuts, TokenRun, cut_path

SMALL = Cuts(part_tokens=64, fresh_tokens=64)


def lengths(seed):
    rng = random.Random(seed)
    return [rng.choice([0, 1, 5, 16, 17, 32, 63, 64, 65, 200]) for _ in range(rng.randint(0, 30))]


@pytest.mark.parametrize("cuts", [SMALL, Cuts(64, 0), Cuts()])
@pytest.mark.parametrize("seed", range(8))
def test_parts_cover_the_path_once_in_order_and_are_bounded(cuts, seed):
    visible = lengths(seed)
    parts = cut_path(visible, 16, cuts)
    runs = [run for part in parts for run in part]
    expected = [(number, token) for number, count in enumerate(visible) for token in range(count)]
    found = [(run.part, run.first + i) for run in runs for i in range(run.tokens)]
    assert found == expected
    assert all(run.first % 16 == 0 for run in runs)
    for part in parts:
        assert sum(-(-run.tokens // 16) for run in part) <= cuts.part_tokens // 16


def test_fresh_segments_are_parts_of_their_own_and_old_ones_are_joined():
    parts = cut_path([32] * 10, 16, SMALL)
    # 320 tokens: segments that begin before token 256 are old.
    assert [len(part) for part in parts] == [2, 2, 2, 2, 1, 1]
    assert cut_path([32] * 10, 16, Cuts(64, 0))[-1] == [TokenRun(8, 0, 32), TokenRun(9, 0, 32)]


def test_long_segments_are_split_at_whole_parts():
    assert cut_path([130], 16, SMALL) == [
        [TokenRun(0, 0, 64)],
        [TokenRun(0, 64, 64)],
        [TokenRun(0, 128, 2)],
    ]
    assert cut_path([64, 65, 63], 16, Cuts(64, 1000)) == [
        [TokenRun(0, 0, 64)],
        [TokenRun(1, 0, 64)],
        [TokenRun(1, 64, 1)],
        [TokenRun(2, 0, 63)],
    ]
    assert cut_path([], 16, SMALL) == cut_path([0, 0], 16, SMALL) == []


def test_beams_of_about_the_same_length_cut_their_common_prefix_alike():
    prefix = [40, 7, 90, 33, 12, 64, 5, 28]
    one, other = (cut_path([*prefix, *own], 16, SMALL) for own in ([20, 11], [31]))
    shared = [part for part in one if all(run.part < len(prefix) for run in part)]
    assert other[: len(shared)] == shared
    assert len(shared) == len(one) - 2

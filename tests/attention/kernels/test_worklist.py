"""Work lists: every row reads every token of its path once, and rows that share read together."""

import numpy as np
import pytest
import torch

from beamwright.attention.kernels.worklist import (
    Cuts,
    WorkBuffers,
    cut_path,
    make_decode_work,
    make_prefill_work,
)
from beamwright.kv.segments import PathPart

CUTS = Cuts(part_tokens=32)


def tokens_of(path):
    """(block, slot in it) of every token of a path."""
    return [(p.segment.blocks[at // 16], at % 16) for p in path or () for at in range(p.visible)]


def read_entries(work, first, count):
    return [
        (int(work.entry_blocks[entry]), slot)
        for entry in range(first, first + count)
        for slot in range(work.entry_tokens[entry])
    ]


def read_rows(work, num_rows):
    """What each row reads, found the way the kernels find it."""
    of_slot = {}
    for first_entry, num_entries, first_slot, num_slots in work.items.reshape(-1, 4):
        for slot in range(first_slot, first_slot + num_slots):
            assert slot not in of_slot
            of_slot[slot] = read_entries(work, first_entry, num_entries)
    found = []
    for row in range(num_rows):
        first, parts = work.row_parts[2 * row : 2 * row + 2]
        slots = work.row_slots[first : first + parts - 1]
        assert all(work.slot_rows[slot] == row for slot in slots)
        found.append([token for slot in slots for token in of_slot[slot]])
    assert len(of_slot) == len(work.slot_rows) == len(work.row_slots)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("queries", [1, 3, 64])
def test_each_row_reads_its_path_in_order(make_forest, seed, queries):
    forest = make_forest(5, seed=seed)
    paths = [None, *forest.paths, ()]  # a row that is not read, and one without a path
    work = make_decode_work(paths, 16, CUTS, queries)
    assert read_rows(work, len(paths)) == [tokens_of(path) for path in paths]
    assert max(work.items.reshape(-1, 4)[:, 3]) <= queries


def test_what_is_not_on_the_device_cannot_be_read(make_forest):
    segment = make_forest(1).store.create("lost")
    segment.length = 20
    with pytest.raises(AssertionError, match="'lost' is read, but not on the device"):
        make_decode_work([(PathPart(segment, 20),)], 16, CUTS, 64)


@pytest.mark.parametrize("copy_per_row", [False, True])
def test_prefill_tiles_cover_every_new_token(make_forest, copy_per_row):
    forest = make_forest(4)
    paths, lengths = [*forest.paths[:3], ()], [1, 40, 16, 7]
    work = make_prefill_work(paths, lengths, 16, 9, copy_per_row=copy_per_row)
    covered = []
    for first_entry, num_entries, own, first, count, last, before in work.tiles.reshape(-1, 7):
        row = int(np.searchsorted(np.cumsum(lengths), first, side="right"))
        assert own == sum(lengths[:row])
        assert before == sum(part.visible for part in paths[row])
        assert last == first + count - own <= lengths[row]
        assert read_entries(work, first_entry, num_entries) == tokens_of(paths[row])
        assert count <= 9
        covered += range(first, first + count)
    assert covered == list(range(sum(lengths)))


def test_lists_are_rewritten_in_place_until_they_outgrow_their_room(make_forest):
    forest = make_forest(5)
    buffers = WorkBuffers(torch.device("cpu"))
    small = make_decode_work(forest.paths[:2], 16, CUTS, 64)
    large = make_decode_work(forest.paths, 16, CUTS, 64)
    before = buffers.write(large)
    after = buffers.write(small)
    assert buffers.num_moves == 1
    assert [a.data_ptr() for a in after] == [b.data_ptr() for b in before]
    assert after[0][: len(small.items)].tolist() == small.items.tolist()
    assert not after[0][len(small.items) :].any(), "items that are not there have no slots"
    assert all(each.dtype == torch.int32 for each in after)


# --- where a path is cut depends on nothing but the path -------------------------------------


def test_beams_cut_their_common_prefix_alike():
    """But for its last part, which each has joined its own to."""
    prefix = [40, 7, 90, 33, 12, 64, 5, 28]
    one, other = (cut_path([*prefix, *own], 16, Cuts(part_tokens=64)) for own in ([20, 11], [31]))
    whole = cut_path(prefix, 16, Cuts(part_tokens=64))[:-1]
    assert len(whole) > 3
    assert one[: len(whole)] == other[: len(whole)] == whole

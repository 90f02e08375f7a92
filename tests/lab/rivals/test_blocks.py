from beamwright_lab.rivals.blocks import PrefixBlocks


def filled(num_blocks, keys):
    """A pool in which one sequence has cached these keys and let go of them."""
    pool = PrefixBlocks(num_blocks)
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.store(block, key)
    pool.release(blocks)
    return pool, blocks


def test_a_released_block_is_found_until_it_is_allocated_again():
    pool, blocks = filled(2, [1, 2])
    assert pool.match([1, 2]) == blocks
    pool.allocate(2)
    assert pool.match([1, 2]) == []


def test_the_tail_of_a_sequence_is_evicted_before_its_head():
    pool, blocks = filled(3, [1, 2, 3])
    pool.allocate(1)
    assert pool.match([1, 2, 3]) == blocks[:2]
    pool.allocate(1)
    assert pool.match([1, 2, 3]) == blocks[:1]


def test_the_least_recently_released_sequence_is_evicted_first():
    pool, _ = filled(4, [1, 2])
    later = pool.allocate(2)
    for block, key in zip(later, (3, 4), strict=True):
        pool.store(block, key)
    pool.release(later)
    pool.allocate(2)
    assert pool.match([1]) == []
    assert pool.match([3, 4]) == later


def test_blocks_without_content_are_allocated_before_cached_ones():
    pool, _ = filled(3, [1])
    half_full = pool.allocate(1)
    pool.release(half_full)
    pool.allocate(1)
    pool.allocate(1)
    assert pool.match([1])


def test_a_block_that_somebody_holds_is_never_allocated():
    pool, blocks = filled(3, [1, 2, 3])
    pool.hold(blocks[:2])
    assert pool.num_free == 1
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [blocks[2]]


def test_idle_hits_count_against_what_is_free():
    pool, blocks = filled(3, [1, 2, 3])
    assert pool.fits(blocks[:2], 3)
    other = pool.allocate(1)  # the third one's
    assert not pool.fits(blocks[:2], 3)
    pool.release(other)
    pool.hold(blocks[:2])
    assert pool.fits(blocks[:2], 3)


def test_a_match_ends_at_the_first_missing_block():
    pool, blocks = filled(2, [1, 3])
    assert pool.match([1, 2, 3]) == blocks[:1]


def test_equal_contents_in_two_blocks_are_both_known():
    pool, first = filled(2, [1])
    second = pool.allocate(1)
    pool.store(second[0], 1)
    pool.allocate(1)
    assert pool.match([1]) == second
    assert first != second

import math

from beamwright_lab.rivals.radix import RadixCache

ROOT, A, B, AA = (), (0,), (1,), (0, 0)


def cache_of(*nodes, tokens=10, **options):
    cache = RadixCache(**options)
    for node in nodes:
        cache.insert(node, tokens)
    return cache


def test_the_least_recently_used_leaf_goes_first():
    cache = cache_of(ROOT, A, B)
    cache.evict(1)
    assert (cache.on_device(A), cache.on_device(B)) == (0, 10)


def test_only_leaves_are_evicted_parents_after_their_children():
    cache = cache_of(ROOT, A, AA)
    cache.evict(10)
    assert [cache.on_device(node) for node in (ROOT, A, AA)] == [10, 10, 0]
    cache.evict(10)
    assert [cache.on_device(node) for node in (ROOT, A, AA)] == [10, 0, 0]


def test_what_a_request_reads_stays():
    cache = cache_of(ROOT, A, B)
    for node in (ROOT, A):
        cache.lock(node)
    cache.evict(1_000)
    assert [cache.on_device(node) for node in (ROOT, A, B)] == [10, 10, 0]
    assert (cache.tokens, cache.evictable_tokens) == (20, 0)
    cache.unlock(A)
    assert cache.evictable_tokens == 10


def test_without_a_host_an_evicted_step_is_lost():
    cache = cache_of(ROOT, A)
    assert cache.evict(10) == 0
    assert (cache.on_device(A), cache.on_host(A)) == (0, 0)


def test_write_back_stores_a_step_when_it_is_evicted_and_once():
    cache = cache_of(ROOT, A, host=True)
    assert cache.evict(10) == 10
    assert (cache.on_device(A), cache.on_host(A)) == (0, 10)
    assert cache.load(A) == 10
    assert (cache.on_device(A), cache.on_host(A)) == (10, 0)
    assert cache.evict(10) == 0, "the host has it still"


def test_write_through_stores_a_step_when_it_is_inserted_and_once():
    cache = cache_of(ROOT, A, host=True, write_through=True)
    assert cache.take_unstored() == 20
    assert cache.evict(10) == 0
    assert (cache.on_device(A), cache.on_host(A)) == (0, 10)
    assert cache.load(A) == 10
    cache.insert(A, 11)
    assert cache.take_unstored() == 1
    assert cache.evict(10) == 0


def test_a_step_that_has_grown_stores_what_is_new():
    cache = cache_of(ROOT, A, host=True)
    cache.evict(10)
    cache.load(A)
    assert cache.insert(A, 11) == 1
    assert cache.evict(10) == 1


def test_equal_tokens_of_two_requests_are_kept_once():
    cache = cache_of(ROOT, A)
    assert cache.insert(A, 10) == 0
    assert cache.tokens == 20


def test_where_the_future_is_known_the_farthest_use_goes_first_and_the_dead_are_not_stored():
    future = {ROOT: 0.0, A: 1.0, B: 2.0, (2,): math.inf}
    cache = cache_of(ROOT, A, B, (2,), host=True, next_use=future.__getitem__)
    assert cache.evict(10) == 0
    assert cache.on_device((2,)) == cache.on_host((2,)) == 0
    assert cache.evict(10) == 10
    assert cache.on_host(B) == 10

"""SGLang's rules one by one, on pages of one token."""

import pytest

from beamwright_lab.rivals.requests import StepRequest, requests_by_round
from beamwright_lab.rivals.sglang import AdmissionForesight, SglangEngine
from engine_searches import Step, admitted, one_round, run, two_rounds


def test_prefill_comes_before_decoding_and_runs_alone():
    engine = SglangEngine(10_000)
    engine.submit(one_round(1))
    engine.commit(engine.schedule())
    engine.submit([two_rounds()[1][0]])
    iteration = engine.schedule()
    assert admitted(iteration) == [(0, 0)]


def test_a_prefix_that_is_being_computed_is_waited_for():
    engine = SglangEngine(10_000)
    engine.submit(one_round(3, prompt=64))
    first = engine.schedule()
    assert [tokens for _, tokens in first.rows] == [64]
    engine.commit(first)
    assert [tokens for _, tokens in engine.schedule().rows] == [1, 1]


def test_a_step_is_found_when_it_is_complete_but_for_its_last_token():
    engine = SglangEngine(10_000)
    first, second = two_rounds()
    run(engine, first)
    assert engine.cache.on_device((0,)) == 31
    engine.submit(second)
    iteration = engine.schedule()
    assert [tokens for _, tokens in iteration.rows] == [1, 1, 1, 1]
    engine.commit(iteration)
    assert engine.cache.on_device((0,)) == 32


def test_admission_reserves_the_whole_step_of_a_new_request_and_a_share_of_the_running():
    # A prompt of 20 and steps of 100: the first two need 20 + 100 and 1 + 100, and one token each.
    engine = SglangEngine(20 + 2 * 101 + 2)
    engine.submit(one_round(3, prompt=20, step=100))
    iteration = engine.schedule()
    assert admitted(iteration) == [(0,)], "the prompt of the second is no hit yet: 20 more"
    engine.commit(iteration)
    assert admitted(engine.schedule()) == [(1,)], "of the 99 to come, 0.7 are reserved"


def test_the_reserve_falls_with_every_pass():
    engine = SglangEngine(10_000)
    run(engine, one_round(1, step=101))
    assert engine.reserved == pytest.approx(0.7 - 100 * (0.7 - 0.098) / 600)


def test_retraction_takes_the_request_with_the_fewest_new_tokens_and_its_kv():
    engine = SglangEngine(110)
    second = one_round(2, prompt=40)[1]
    first = StepRequest(((),), (40,), (0,), 64)
    engine.reserved = 0.0
    engine.submit([first])
    engine.commit(engine.schedule())
    engine.commit(engine.schedule())
    engine.submit([second])
    while not engine.preemptions:
        engine.commit(engine.schedule())
    assert engine.waiting == [second]
    assert second.computed == 0
    assert 0 < second.drawn < first.drawn
    assert engine.cache.on_device(second.node) == 0, "its tokens are not in the cache"


def test_a_retraction_sets_the_reserve_anew():
    engine = SglangEngine(90)
    engine.reserved = 0.0
    engine.submit(one_round(2, prompt=40))
    while not engine.preemptions:
        engine.commit(engine.schedule())
    (left,) = engine.running
    assert engine.reserved <= (left.drawn + 20) / 32


def test_heavier_subtrees_come_first():
    steps = [Step((i,), 8) for i in range(2)]
    steps += [Step((0, 0), 8), *(Step((1, j), 8) for j in range(3))]
    first, second = requests_by_round(32, steps)
    engine = SglangEngine(10_000)
    run(engine, first)
    engine.submit(second)
    assert admitted(engine.schedule()) == [(1, 0), (1, 1), (1, 2), (0, 0)]


def hicache_after_a_round(num_tokens, **options):
    """An engine that has lost a survivor of the first round to the last steps of that round."""
    first, second = two_rounds(survivors=(1,), num_beams=6)
    engine = SglangEngine(num_tokens, **options)
    iterations = run(engine, first)
    return engine, iterations, second


def test_eviction_waits_for_the_store_and_admission_loads_back():
    engine, iterations, second = hicache_after_a_round(110, hicache="write_back")
    assert sum(each.evicted_tokens for each in iterations) > 0
    assert engine.cache.on_host((1,)) == 31
    engine.submit(second)
    iteration = engine.schedule()
    assert iteration.load_tokens == 31
    assert [tokens for _, tokens in iteration.rows][:1] == [1]


def test_write_through_sends_what_enters_the_cache_and_eviction_waits_for_nothing():
    engine, iterations, second = hicache_after_a_round(110, hicache="write_through")
    assert sum(each.evicted_tokens for each in iterations) == 0
    sent = sum(each.store_tokens for each in iterations)
    assert sent == engine.cache.host_tokens - engine.cache.take_unstored()
    assert engine.cache.on_host((1,)) == 31
    engine.submit(second)
    assert engine.schedule().load_tokens == 31


def test_without_a_host_tier_the_prefix_is_computed_again():
    engine, iterations, second = hicache_after_a_round(110)
    assert sum(each.evicted_tokens for each in iterations) == 0
    engine.submit(second)
    assert engine.schedule().rows[0][1] == 32


def test_with_foresight_nothing_is_stored_that_is_never_read():
    first, second = two_rounds(survivors=(5,), num_beams=6)
    engine = SglangEngine(110, hicache="write_back", foresight=AdmissionForesight([first, second]))
    assert sum(each.evicted_tokens for each in run(engine, first)) == 0
    assert engine.cache.on_device((5,)) == 31

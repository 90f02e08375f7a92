"""vLLM's rules one by one, on blocks of 16 tokens."""

from beamwright_lab.rivals.requests import StepRequest
from beamwright_lab.rivals.vllm import VllmEngine
from engine_searches import admitted, one_round, run, two_rounds


def until_preemption(engine):
    while not engine.preemptions:
        iteration = engine.schedule()
        engine.commit(iteration)
    return iteration


def test_prefix_hits_are_whole_blocks_and_leave_a_token_to_compute():
    engine = VllmEngine(100)
    first, second = two_rounds()
    run(engine, first)
    engine.submit(second)
    (new,) = {tokens for _, tokens in engine.schedule().rows}
    # 64 tokens, 63 of them with KV: three full blocks are found.
    assert new == 16


def test_the_hit_ends_before_the_last_block_even_if_all_of_it_is_cached():
    engine = VllmEngine(100)
    requests = one_round(2)
    run(engine, requests[:1])
    engine.submit(requests[1:])
    assert [tokens for _, tokens in engine.schedule().rows] == [16]


def test_equal_prompts_share_what_the_same_iteration_computes():
    engine = VllmEngine(100)
    engine.submit(one_round(3))
    assert [tokens for _, tokens in engine.schedule().rows] == [32, 16, 16]


def test_admission_needs_the_present_sequence_only_and_ends_at_the_first_failure():
    # A prompt of two blocks, the first one shared, and no room reserved for the step's own two.
    engine = VllmEngine(4)
    engine.submit(one_round(4))
    assert admitted(engine.schedule()) == [(0,), (1,), (2,)]


def test_admission_ends_at_the_first_request_that_does_not_fit():
    engine = VllmEngine(6)
    first, long, short = (
        StepRequest(((i,),), (n,), (i, 0), 32) for i, n in enumerate((40, 80, 16))
    )
    engine.submit([first, long, short])
    assert admitted(engine.schedule()) == [first.node]
    assert list(engine.waiting) == [long, short], "the short one would fit, and waits"


def test_the_request_admitted_last_is_preempted_first():
    engine = VllmEngine(5)
    engine.submit(one_round(3))
    until_preemption(engine)
    assert [request.node for request in engine.waiting] == [(2,)]


def test_a_preempted_request_keeps_its_tokens_and_waits_at_the_head():
    engine = VllmEngine(5)
    requests = one_round(4)
    engine.submit(requests)
    until_preemption(engine)
    victim = engine.waiting[0]
    assert victim.node == (2,)
    assert victim.drawn == 1
    assert victim.computed == 0
    assert engine.waiting[1] is requests[3]


def test_an_iteration_that_preempted_admits_nobody():
    engine = VllmEngine(5)
    first = one_round(3)
    engine.submit(first)
    iteration = until_preemption(engine)
    assert admitted(iteration) == [(0,), (1,)]
    assert [request.node for request in engine.waiting] == [(2,)]


def test_recompute_costs_what_was_overwritten_and_no_more():
    engine = VllmEngine(5)
    engine.submit(one_round(3))
    again = {}
    while not again:
        iteration = engine.schedule()
        back = {request.node: tokens for request, tokens in iteration.rows}
        again = back if engine.preemptions == 2 and len(back) == 2 else {}
        engine.commit(iteration)
    # Of (1), 49 tokens, the third block was overwritten; all that (2) had is cached still.
    assert again == {(1,): 17, (2,): 1}


def test_full_blocks_are_stored_one_iteration_after_they_were_computed():
    engine = VllmEngine(100, offload=True)
    engine.submit(one_round(1))
    first = engine.schedule()
    assert first.store_tokens == 0
    engine.commit(first)
    assert engine.schedule().store_tokens == 32


def test_a_block_is_stored_once():
    engine = VllmEngine(100, offload=True)
    iterations = run(engine, one_round(4))
    engine.submit(one_round(1, prompt=320))
    stored = sum(each.store_tokens for each in iterations) + engine.schedule().store_tokens
    # The prompt's two blocks and the first of each step; the second one lacks its last token.
    assert stored == 32 + 4 * 16
    assert engine.host_peak_tokens == stored


def overwritten():
    """An engine whose device has lost all blocks of a step, and the requests that need them."""
    engine = VllmEngine(8, offload=True)
    first, second = two_rounds()
    run(engine, first[:1])
    run(engine, [StepRequest(((9,),), (96,), (9, 0), 32)])  # behind another prompt
    return engine, second[:2]


def test_what_the_device_lost_is_loaded_and_waited_for():
    engine, (request, _) = overwritten()
    assert engine.pool.match(engine.keys(request)[:3]) == []
    engine.submit([request])
    iteration = engine.schedule()
    assert iteration.rows == []
    assert iteration.loads == [(request, 48)]
    engine.loaded(request)
    assert [new for _, new in engine.schedule().rows] == [16]


def test_a_load_is_what_follows_the_hits_on_the_device():
    engine, (request, _) = overwritten()
    (kept,) = engine.pool.allocate(1)
    engine.pool.store(kept, engine.keys(request)[0])
    engine.pool.release([kept])
    engine.submit([request])
    assert engine.schedule().loads == [(request, 32)]


def test_requests_share_a_block_that_is_on_its_way():
    engine, requests = overwritten()
    engine.submit(requests)
    assert [tokens for _, tokens in engine.schedule().loads] == [48, 0]

"""The rules of rival engines, one by one: vLLM on blocks of 16 tokens, SGLang on pages of one.

Each table says what is scheduled, found or lost; a rule that is missing here flatters or hurts a
rival in every comparison.
"""

from math import inf

import pytest

from beamwright_lab.rivals.blocks import PrefixBlocks
from beamwright_lab.rivals.radix import RadixCache
from beamwright_lab.rivals.requests import StepRequest, requests_by_round
from beamwright_lab.rivals.sglang import AdmissionForesight, SglangEngine
from beamwright_lab.rivals.vllm import StepEngine, VllmEngine
from simulated import recorded


def rounds_of(steps, prompt=32):
    """Requests of every round. steps: lineage -> tokens."""
    return requests_by_round(prompt, recorded(prompt, steps).nodes)


def one_round(num_beams, prompt=32, step=32):
    """Requests of the first round: all behind one prompt."""
    return rounds_of({(i,): step for i in range(num_beams)}, prompt)[0]


def two_rounds(survivors=(0, 1), width=2, num_beams=4):
    first = {(i,): 32 for i in range(num_beams)}
    return rounds_of({**first, **{(i, j): 32 for i in survivors for j in range(width)}})


def run(engine, requests, most=10_000):
    """Drive an engine to the end of a round; loads arrive at once. Returns its iterations."""
    engine.submit(requests)
    left, seen = len(requests), []
    for _ in range(most):
        if not left:
            return seen
        iteration = engine.schedule()
        seen.append(iteration)
        if iteration.rows:
            left -= len(engine.commit(iteration))
        for request, _tokens in iteration.loads:
            engine.loaded(request)
    raise AssertionError("the engine does not come to an end")


def admitted(iteration):
    """Nodes of the requests that an iteration forwards."""
    return [request.node for request, _ in iteration.rows]


def computed(iteration):
    """Tokens that it computes of each."""
    return [tokens for _, tokens in iteration.rows]


def until_preemption(engine, requests=()):
    engine.submit(requests)
    while not engine.preemptions:
        engine.commit(iteration := engine.schedule())
    return iteration


# --- requests --------------------------------------------------------------------------------


def test_a_step_is_a_prompt_of_its_whole_path_and_siblings_go_beside_each_other():
    first, second = two_rounds()
    assert (len(first), len(second)) == (4, 4)
    last = second[-1]
    assert (last.path, last.node) == (((), (1,)), (1, 1))
    assert (last.prompt_tokens, last.final_tokens) == (64, 96)
    steps = {(1, 0): 1, (0, 0): 1, (1, 1): 1, (0, 1): 1, (0,): 1, (1,): 1}
    assert [r.node for r in rounds_of(steps)[1]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    "engine",
    [
        VllmEngine(9),
        VllmEngine(9, offload=True),
        SglangEngine(9 * 16),
        SglangEngine(9 * 16, hicache="write_through"),
    ],
    ids=["vllm", "vllm-offload", "sglang", "sglang-hicache"],
)
def test_every_engine_completes_a_search_that_does_not_fit(engine):
    for requests in two_rounds():
        run(engine, requests)
        assert all(request.complete for request in requests)
        assert all(r.computed == r.final_tokens - 1 for r in requests), "the last one has no KV"
    assert engine.peak_tokens <= 9 * 16
    if isinstance(engine, VllmEngine):
        assert engine.pool.num_free == 9
    else:
        assert engine.cache.locked_tokens == 0


# --- vLLM ------------------------------------------------------------------------------------


def test_a_match_ends_at_the_first_missing_block():
    pool = PrefixBlocks(2)
    blocks = pool.allocate(2)
    for block, key in zip(blocks, (1, 3), strict=True):
        pool.store(block, key)
    assert pool.match([1, 2, 3]) == blocks[:1]


ODD = [StepRequest(((i,),), (n,), (i, 0), 32) for i, n in enumerate((40, 80, 16))]


@pytest.mark.parametrize(
    ("num_blocks", "before", "requests", "rows"),
    [
        # Of 64 tokens 63 have KV: three full blocks are found.
        (100, two_rounds()[0], two_rounds()[1], [16] * 4),
        # A hit ends before the last block, even if all of it is cached.
        (100, one_round(2)[:1], one_round(2)[1:], [16]),
        # Equal prompts share what the same iteration computes.
        (100, [], one_round(3), [32, 16, 16]),
        # A prompt of two blocks, the first one shared, and no room reserved for the step's two.
        (4, [], one_round(4), [32, 16, 16]),
        # Admission ends at the first that does not fit: the third one would, and waits.
        (6, [], ODD, [40]),
    ],
)
def test_what_vllm_computes_in_an_iteration(num_blocks, before, requests, rows):
    engine = VllmEngine(num_blocks)
    run(engine, before)
    engine.submit(requests)
    assert computed(engine.schedule()) == rows
    assert list(engine.waiting) == requests[len(rows) :]


def test_the_last_admitted_is_preempted_keeps_its_tokens_and_waits_at_the_head():
    engine, requests = VllmEngine(5), one_round(4)
    iteration = until_preemption(engine, requests)
    assert admitted(iteration) == [(0,), (1,)], "an iteration that preempted admits nobody"
    victim, following = engine.waiting
    assert (victim.node, victim.drawn, victim.computed) == ((2,), 1, 0)
    assert following is requests[3]


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


def test_full_blocks_are_stored_once_an_iteration_after_they_were_computed():
    engine = VllmEngine(100, offload=True)
    iterations = run(engine, one_round(4))
    assert [each.store_tokens for each in iterations[:2]] == [0, 32]
    engine.submit(one_round(1, prompt=320))
    stored = sum(each.store_tokens for each in iterations) + engine.schedule().store_tokens
    # The prompt's two blocks and the first of each step; the second one lacks its last token.
    assert stored == 32 + 4 * 16 == engine.host_peak_tokens


@pytest.mark.parametrize(
    ("kept", "loads"),
    [(0, [48, 0]), (1, [32, 0])],  # siblings share a block that is on its way
)
def test_what_the_device_lost_is_loaded_behind_its_hits_and_waited_for(kept, loads):
    engine = VllmEngine(8, offload=True)
    first, (request, sibling, *_) = two_rounds()
    run(engine, first[:1])
    run(engine, [StepRequest(((9,),), (96,), (9, 0), 32)])  # behind another prompt: all is lost
    assert engine.pool.match(engine.keys(request)[:3]) == []
    for block, key in zip(engine.pool.allocate(kept), engine.keys(request)[:kept], strict=True):
        engine.pool.store(block, key)
        engine.pool.release([block])
    engine.submit([request, sibling])
    iteration = engine.schedule()
    assert iteration.rows == []
    assert [tokens for _, tokens in iteration.loads] == loads
    engine.loaded(request)
    assert computed(engine.schedule())[0] == 16


# --- STEP: a path has four blocks, the first one shared ----------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "scores", "complete"),
    [
        (7, (0.1, 0.5, 0.9), [(1,), (2,)]),  # the lowest score, wherever it stands
        (7, (0.5, 0.5, 0.5), [(0,), (1,)]),  # of equal ones the last admitted
        (7, (None, None, 0.5), [(0,), (1,)]),  # and of none
        (4, (0.9, 0.8, 0.7, 0.1), [(0,), (3,)]),  # who has not begun waits
    ],
)
def test_whom_step_stops_where_memory_ends(num_blocks, scores, complete):
    engine, done = StepEngine(num_blocks), []
    engine.submit(StepRequest(((),), (32,), (at,), 32, score) for at, score in enumerate(scores))
    while len(done) + len(engine.stopped) < len(scores):
        done += engine.commit(engine.schedule())
    assert [request.node for request in done] == complete
    assert (engine.preemptions, engine.pool.num_held) == (0, 0)


def test_where_all_fits_step_is_vllm():
    step, vllm = (
        [admitted(each) for each in run(engine, one_round(4))]
        for engine in (StepEngine(100), VllmEngine(100))
    )
    assert step == vllm


# --- SGLang ----------------------------------------------------------------------------------

ROOT, A, B, C, AA = (), (0,), (1,), (2,), (0, 0)
FUTURE = {ROOT: 0.0, A: 1.0, B: 2.0, C: inf}


def cache_of(*nodes, tokens=10, **options):
    cache = RadixCache(**options)
    for node in nodes:
        cache.insert(node, tokens)
    return cache


@pytest.mark.parametrize(
    ("nodes", "options", "evictions", "stored", "device", "host"),
    [
        ((ROOT, A, B), {}, [1], [0], {A: 0, B: 10}, {A: 0}),  # the least recent; it is lost
        ((ROOT, A, AA), {}, [10], [0], {ROOT: 10, A: 10, AA: 0}, {}),  # leaves only
        ((ROOT, A, AA), {}, [10, 10], [0, 0], {ROOT: 10, A: 0, AA: 0}, {}),
        ((ROOT, A), {"host": True}, [10], [10], {A: 0}, {A: 10}),  # write back
        # What is used last goes first, and what is never used is not stored.
        (
            (ROOT, A, B, C),
            {"host": True, "next_use": FUTURE.__getitem__},
            [10, 10],
            [0, 10],
            {A: 10, B: 0, C: 0},
            {B: 10, C: 0},
        ),
    ],
)
def test_what_a_radix_cache_evicts_and_stores(nodes, options, evictions, stored, device, host):
    cache = cache_of(*nodes, **options)
    assert [cache.evict(tokens) for tokens in evictions] == stored
    assert {node: cache.on_device(node) for node in device} == device
    assert {node: cache.on_host(node) for node in host} == host


def test_what_a_request_reads_stays_until_it_is_let_go():
    cache = cache_of(ROOT, A, B)
    cache.lock(A)
    cache.evict(1_000)
    assert [cache.on_device(node) for node in (ROOT, A, B)] == [10, 10, 0]
    cache.unlock(A)
    cache.evict(1_000)
    assert cache.tokens == 0


def test_what_is_written_through_is_stored_once():
    cache = cache_of(ROOT, A, host=True, write_through=True)
    assert cache.take_unstored() == 20
    assert (cache.insert(A, 11), cache.insert(A, 11)) == (1, 0), "equal tokens are kept once"
    assert (cache.take_unstored(), cache.evict(1_000)) == (1, 0)


def test_prefill_runs_alone_and_a_prefix_that_is_being_computed_is_waited_for():
    engine = SglangEngine(10_000)
    engine.submit(one_round(3, prompt=64))
    for rows in ([64], [1, 1]):
        iteration = engine.schedule()
        assert computed(iteration) == rows
        engine.commit(iteration)
    engine.submit([two_rounds()[1][0]])
    assert admitted(engine.schedule()) == [(0, 0)]


def test_a_step_is_found_when_it_is_complete_but_for_its_last_token():
    engine = SglangEngine(10_000)
    first, second = two_rounds()
    run(engine, first)
    assert engine.cache.on_device((0,)) == 31
    engine.submit(second)
    iteration = engine.schedule()
    assert computed(iteration) == [1, 1, 1, 1]
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
    engine, second = SglangEngine(110), one_round(2, prompt=40)[1]
    first = StepRequest(((),), (40,), (0,), 64)
    engine.reserved = 0.0
    engine.submit([first])
    for _ in range(2):
        engine.commit(engine.schedule())
    until_preemption(engine, [second])
    assert engine.waiting == [second]
    assert second.computed == 0 < second.drawn < first.drawn
    assert engine.cache.on_device(second.node) == 0, "its tokens are not in the cache"


def test_heavier_subtrees_come_first():
    second_round = [(0, 0), (1, 0), (1, 1), (1, 2)]
    first, second = rounds_of(dict.fromkeys([(0,), (1,), *second_round], 8))
    engine = SglangEngine(10_000)
    run(engine, first)
    engine.submit(second)
    assert admitted(engine.schedule()) == [(1, 0), (1, 1), (1, 2), (0, 0)]


@pytest.mark.parametrize(
    ("hicache", "evicted", "loaded", "first_row"),
    [(None, 0, 0, 32), ("write_back", True, 31, 1), ("write_through", 0, 31, None)],
)
def test_what_the_last_steps_of_a_round_pushed_out(hicache, evicted, loaded, first_row):
    """Without a host it is computed again; eviction waits for a store that begins only then."""
    first, second = two_rounds(survivors=(1,), num_beams=6)
    engine = SglangEngine(110, **({} if hicache is None else {"hicache": hicache}))
    iterations = run(engine, first)
    assert bool(sum(each.evicted_tokens for each in iterations)) == evicted
    assert engine.cache.on_host((1,)) == loaded
    if hicache == "write_through":
        sent = sum(each.store_tokens for each in iterations)
        assert sent == engine.cache.host_tokens - engine.cache.take_unstored()
    engine.submit(second)
    iteration = engine.schedule()
    assert iteration.load_tokens == loaded
    assert first_row is None or computed(iteration)[0] == first_row


def test_with_foresight_nothing_is_stored_that_is_never_read():
    first, second = two_rounds(survivors=(5,), num_beams=6)
    engine = SglangEngine(110, hicache="write_back", foresight=AdmissionForesight([first, second]))
    assert sum(each.evicted_tokens for each in run(engine, first)) == 0
    assert engine.cache.on_device((5,)) == 31

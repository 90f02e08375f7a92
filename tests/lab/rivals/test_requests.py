import pytest

from beamwright_lab.rivals.requests import requests_by_round
from beamwright_lab.rivals.sglang import SglangEngine
from beamwright_lab.rivals.vllm import VllmEngine
from engine_searches import Step, one_round, run, two_rounds


def test_every_step_is_a_prompt_of_its_whole_path():
    rounds = two_rounds()
    assert [len(requests) for requests in rounds] == [4, 4]
    last = rounds[1][-1]
    assert last.path == ((), (1,))
    assert (last.node, last.prompt_tokens, last.final_tokens) == ((1, 1), 64, 96)


def test_siblings_are_sent_beside_each_other():
    steps = [Step((i, j), 1) for j in (0, 1) for i in (1, 0)] + [Step((0,), 1), Step((1,), 1)]
    assert [r.node for r in requests_by_round(4, steps)[1]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


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


def test_one_row_ends_with_its_step():
    (request,) = one_round(1)
    iterations = run(VllmEngine(8), [request])
    assert sum(each.passes for each in iterations) == 32

"""STEP: who is stopped where memory ends. A path has four blocks, the first one shared."""

from beamwright_lab.rivals.requests import StepRequest
from beamwright_lab.rivals.vllm import StepEngine, VllmEngine
from engine_searches import admitted, one_round, run


def scored(*scores):
    return [StepRequest(((),), (32,), (place,), 32, score) for place, score in enumerate(scores)]


def drained(engine, requests):
    """Steps that came to their end, in order."""
    engine.submit(requests)
    complete = []
    while len(complete) + len(engine.stopped) < len(requests):
        complete += engine.commit(engine.schedule())
    return [request.node for request in complete]


def test_the_lowest_score_is_stopped_wherever_it_stands():
    engine = StepEngine(7)
    assert drained(engine, scored(0.1, 0.5, 0.9)) == [(1,), (2,)]
    assert engine.stopped == {(0,)}
    assert engine.preemptions == 0
    assert engine.pool.num_held == 0


def test_of_equal_scores_and_of_none_the_last_admitted_goes():
    assert drained(StepEngine(7), scored(0.5, 0.5, 0.5)) == [(0,), (1,)]
    assert drained(StepEngine(7), scored(None, None, 0.5)) == [(0,), (1,)]


def test_who_has_not_begun_waits_and_is_not_stopped():
    engine = StepEngine(4)
    engine.submit(scored(0.9, 0.8, 0.7, 0.1))
    assert list(map(len, (engine.schedule().rows, engine.waiting))) == [3, 1]
    assert drained(StepEngine(4), scored(0.9, 0.8, 0.7, 0.1)) == [(0,), (3,)]


def test_where_all_fits_it_is_vllm():
    step, vllm = (
        [admitted(each) for each in run(engine, one_round(4))]
        for engine in (StepEngine(100), VllmEngine(100))
    )
    assert step == vllm

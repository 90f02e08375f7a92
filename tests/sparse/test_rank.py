"""A rank on a thread of its own: what is late, dropped, and waited for."""

import threading

import pytest

from beamwright.counters import Counters
from beamwright.sparse.rank import CacheRank, ThreadRank


@pytest.fixture
def counts():
    return Counters()


@pytest.fixture
def rank(counts):
    rank = ThreadRank(counts)
    yield rank
    rank.close()


def test_what_is_waited_for_is_counted(rank, counts):
    gate = threading.Event()
    rank.push(0, lambda: gate.wait(10) and "found")
    rank.push(0, lambda: pytest.fail("only the first counts"))
    assert rank.is_late(0)
    threading.Timer(0.05, gate.set).start()
    assert rank.take(0) == "found"
    assert (counts.rank_takes, counts.rank_late) == (1, 1)
    assert counts.rank_waited_s > 0
    assert rank.take(0) is None


def test_what_was_there_in_time_was_hidden(rank, counts):
    done = threading.Event()
    rank.push(0, lambda: "found")
    rank.push(1, done.set)
    assert done.wait(10)
    assert not rank.is_late(0)
    assert rank.take(0) == "found"
    assert (counts.rank_takes, counts.rank_late, counts.rank_waited_s) == (1, 0, 0.0)


def test_what_is_dropped_runs_to_its_end_before_anything_is_freed(rank, counts):
    began, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def work():
        began.set()
        gate.wait(10)
        ended.set()
        raise ValueError("nobody hears of it")

    rank.push(0, work)
    rank.push(1, lambda: pytest.fail("it was never begun"))
    assert began.wait(10)
    rank.drop(0)
    rank.drop(1)
    rank.push(0, lambda: "next")
    threading.Timer(0.05, gate.set).start()
    rank.settle()
    assert ended.is_set()
    assert rank.take(0) == "next"
    assert counts.rank_reused == 2


def test_inline_nothing_is_late():
    rank = CacheRank()
    rank.push(0, lambda: "found")
    assert not rank.is_late(0)
    rank.drop(0)
    rank.settle()
    assert rank.take(0) is None

"""Small models compute with one thread, and the host program's number comes back."""

import math

import pytest
import torch

from beamwright.attention import make_attention
from beamwright.engine import concurrency
from beamwright.engine.concurrency import (
    SMALL_PARAMETERS,
    GiveWay,
    Threads,
    free_cores,
    threads_for,
)
from beamwright.engine.selftest import threads_agree
from beamwright.models.decoder import Decoder, Linear
from beamwright.models.named_shapes import shape_from_text
from beamwright.models.weights import random_weights
from engines import PROBLEM


@pytest.fixture
def host_threads(monkeypatch):
    """A host program that has given torch two threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("host_threads")
def test_small_models_have_one_thread_and_large_ones_all():
    assert threads_for(SMALL_PARAMETERS).count == 1
    assert threads_for(SMALL_PARAMETERS + 1).count == 2


@pytest.mark.usefixtures("host_threads")
def test_who_says_how_many_gets_as_many(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = threads_for(SMALL_PARAMETERS)
    assert (found.count, found.why) == (2, "OMP_NUM_THREADS is set")


@pytest.mark.usefixtures("host_threads")
def test_a_search_uses_one_thread_and_puts_the_number_back(make_solver):
    solver = make_solver(n=4, width=2, max_rounds=2)
    assert torch.get_num_threads() == 2
    seen = []
    solver.solve(PROBLEM, on_round=lambda _: seen.append(torch.get_num_threads()))
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("host_threads")
def test_the_number_comes_back_after_an_error(make_solver):
    def fail(_):
        raise KeyError("a callback's own error")

    with pytest.raises(KeyError):
        make_solver(n=4, width=2, max_rounds=2).solve(PROBLEM, on_round=fail)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("host_threads")
def test_the_self_test_asks_with_the_threads_that_are_used(make_solver, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "beamwright.solver.assembly.batches_are_exact",
        lambda *_: seen.append(torch.get_num_threads()),
    )
    make_solver()
    assert seen == [1]


# --- giving way ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("host_threads")
def test_only_free_cores_are_taken_and_one_at_least(monkeypatch):
    monkeypatch.setattr(concurrency, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(concurrency, "_LOOK_SHARE", math.inf)
    free = [2]
    give_way, seen = GiveWay(2, lambda: free[0]), []
    for free[0] in (2, 1, 0, -5, 9, None):
        give_way()
        seen.append(torch.get_num_threads())
    assert seen == [2, 1, 1, 1, 2, 2]


def test_it_looks_a_few_hundred_times_a_second_at_most(monkeypatch):
    monkeypatch.setattr(concurrency, "_LOOK_EVERY_S", 3600.0)
    looks = []
    give_way = GiveWay(torch.get_num_threads(), lambda: looks.append(1))
    for _ in range(5):
        give_way()
    assert len(looks) == 1


def test_looking_takes_a_small_share_of_the_time(monkeypatch):
    monkeypatch.setattr(concurrency, "_LOOK_EVERY_S", 0.0)
    now = [0.0]
    monkeypatch.setattr(concurrency.time, "perf_counter", lambda: now[0])

    def look():
        now[0] += 0.001

    give_way = GiveWay(torch.get_num_threads(), look)
    give_way()
    looked = now[0]
    now[0] = looked + 0.09
    give_way()
    assert now[0] == looked + 0.09
    now[0] = looked + 0.11
    give_way()
    assert now[0] > looked + 0.11


def test_cores_that_others_run_on_are_not_free(tmp_path, monkeypatch):
    for number, state in enumerate("RSR"):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} (a ) name) {state} 1 1")
    (tmp_path / "gone").mkdir()
    load = tmp_path.parent / "loadavg"
    load.write_text("0.50 0.40 0.30 5/321 999\n")
    monkeypatch.setattr(concurrency, "_LOAD", load)
    monkeypatch.setattr(concurrency, "_OWN", tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert free_cores() == 8 - (5 - 2)
    load.write_text("no such thing")
    assert free_cores() is None
    monkeypatch.setattr(concurrency, "_LOAD", tmp_path / "nowhere")
    assert free_cores() is None


@pytest.mark.usefixtures("host_threads")
def test_the_number_comes_back_from_who_gave_way():
    with Threads(2, "", gives_way=True).in_use():
        torch.set_num_threads(1)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("host_threads")
def test_a_model_whose_bits_follow_the_threads_gives_no_way():
    text = "llama,layers=1,hidden=64,heads=2,kv_heads=1,intermediate=96,vocab=99,context=128"
    shape = shape_from_text(text)
    decoder = Decoder(shape, random_weights(shape, torch.float64, "cpu", 0))
    assert threads_agree(decoder, make_attention("reference"), 2)

    class Follows(Linear):
        def __call__(self, x):
            return super().__call__(x) * torch.get_num_threads()

    decoder.weights.lm_head = Follows(decoder.weights.lm_head.weight)
    assert not threads_agree(decoder, make_attention("reference"), 2)
    assert torch.get_num_threads() == 2

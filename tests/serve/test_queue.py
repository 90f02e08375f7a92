"""That every request is answered, whatever happens to the thread that searches, or beside it."""

import gc
import json
import logging
from threading import Event

import pytest

from beamwright.errors import Cancelled
from beamwright.serve import endpoint
from beamwright.serve.body import ServerLimits
from beamwright.serve.chat import ChatEndpoint
from beamwright.serve.job import ReplyText
from beamwright.solver.handle import Handle
from beamwright.solver.scheduler import RequestScheduler
from engines import assert_nothing_allocated
from served import ASKED, BODY, held, text_of, until


class Raises:
    """A listener that fails at one thing."""

    def __init__(self, at):
        self.at = at

    def __getattr__(self, what):
        def hear(*args):
            assert what != f"on_{self.at}"

        return hear


@pytest.mark.parametrize("at", ["begun", "round", "ended"])
def test_a_listener_that_raises_is_nobody_else_s(serve, at, caplog):
    server = serve()
    with caplog.at_level(logging.ERROR, "beamwright.serve"):
        server.queue.listeners.insert(0, Raises(at))
        assert server.chat(seed=1).status_code == 200
        server.queue.listeners.pop(0)
        runs = server.http.get("/feed/searches").json()["searches"]
    assert [run["state"] for run in runs] == ["done"], "the feed heard of it all the same"
    assert f"listener Raises failed at {at}" in caplog.text


# --- the thread that searches ----------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_thread_that_dies_leaves_nobody_waiting_and_another_takes_over(serve, monkeypatch, error):
    server = serve()

    def fail(*args):
        raise error

    with held(server) as gate:
        asked = [server.later() for _ in range(3)]
        until(lambda: gate.reached and len(server.queue.jobs) == 3)
        monkeypatch.setattr(RequestScheduler, "_record_outcomes", fail)
    assert [each.result(30).status_code for each in asked] == [500] * 3
    monkeypatch.undo()
    assert server.chat(seed=1).status_code == 200
    assert_nothing_allocated(server.solver)


def test_a_server_ends_while_a_search_is_submitted(serve, monkeypatch):
    server, come, go_on = serve(limits=ServerLimits(drain_s=0.0)), Event(), Event()
    submit, handles = server.solver.submit, []

    def slowly(*args, **options):
        come.set()
        go_on.wait(30)
        handles.append(submit(*args, **options))
        return handles[-1]

    monkeypatch.setattr(server.solver, "submit", slowly)
    asked = server.later(seed=1)
    assert come.wait(30)
    assert server.http.get("/health").status_code == 200, "it holds up nobody"
    server.server.handle_exit(15, None)
    until(lambda: server.queue.draining)
    go_on.set()
    assert asked.result(30).status_code == 503
    server.thread.join(30)
    with pytest.raises(Cancelled):
        handles[0].result(30)
    assert_nothing_allocated(server.solver)


# --- too many, and the end -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "keys", "said"),
    [
        ({"requests": 1}, [None], "this server has 1 running or waiting"),
        ({"requests": 3, "requests_per_key": 1}, ["a", "b"], "this API key has 1"),
    ],
)
def test_one_too_many_is_told_to_come_later(serve, limits, keys, said):
    limits, asked = ServerLimits(**limits, drain_s=5.0), []
    server = serve(limits=limits, keys=[*filter(None, keys)])
    with held(server):
        for number, key in enumerate(keys, 1):
            asked.append(server.later(key=key, seed=1))
            until(lambda number=number: len(server.queue.jobs) == number)
        response = server.chat()
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (429, "queue_full")
        assert said in error["message"]
        assert int(response.headers["retry-after"]) >= 1
        assert "x-should-retry" not in response.headers
        assert server.http.get("/health").status_code == 200
    assert {each.result(60).status_code for each in asked} == {200}


def test_whoever_ends_the_server_ends_streams_properly(serve):
    server = serve(limits=ServerLimits(drain_s=0.2))
    with held(server) as gate:
        stream = server.threads.submit(server.stream, seed=1)
        until(lambda: gate.reached)
        server.server.handle_exit(15, None)
        until(lambda: any(j.handle._request.cancelled for j in server.queue.jobs.values()))
        assert server.http.get("/health").json()["status"] == "draining"
        assert server.http.get("/ready").status_code == 503
        refused = server.chat()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30"), "ask again"
    events = stream.result(30)
    assert events[-1]["choices"][0]["finish_reason"] or "error" in events[-1]
    server.thread.join(30)
    assert_nothing_allocated(server.solver)


# --- clients that leave, streams that fail ---------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_who_leaves_is_cancelled_and_frees_everything(serve, streamed, caplog):
    server = serve()
    raw = server.raw(json.dumps({**BODY, "stream": streamed}).encode())
    with held(server) as gate:
        with server.connect() as client:
            client.sendall(b"".join(raw))
            until(lambda: gate.reached)
            (job,) = server.queue.jobs.values()
        until(lambda: job.handle._request.cancelled)
    until(lambda: not server.queue.jobs)
    assert job.state == "cancelled"
    assert_nothing_allocated(server.solver)
    assert server.chat(seed=1).status_code == 200
    gc.collect()
    assert [each.message for each in caplog.records if each.name == "asyncio"] == []


def test_who_leaves_in_the_middle_of_a_body_is_no_bug(served, caplog):
    with caplog.at_level(logging.ERROR):
        head, body = served.raw(json.dumps(BODY).encode())
        with served.connect() as client:
            client.sendall(head + body[:1])
        assert served.http.get("/health").status_code == 200
    assert not caplog.records


def test_a_bug_in_a_reply_is_logged_and_told(serve, monkeypatch, caplog):
    server = serve()
    for name in ("delta", "content"):
        monkeypatch.setattr(ChatEndpoint, name, lambda *args: 1 // 0)
    with caplog.at_level(logging.ERROR):
        (event,) = server.stream()
    assert event["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text
    until(lambda: not server.queue.jobs)
    ports = set()
    for _ in range(3):
        response = server.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(ports) == 1, "it does not cost the connection"


def test_a_silent_stream_says_that_it_is_there(serve, monkeypatch):
    monkeypatch.setattr(endpoint, "QUIET_S", 0.02)
    server = serve()
    head, body = server.raw(json.dumps({**BODY, "stream": True}).encode(), connection="close")
    with held(server), server.connect() as client:
        client.sendall(head + body)
        found = b""
        while endpoint.COMMENT not in found:
            found += client.recv(1000)
    assert b"data: " not in found.split(endpoint.COMMENT)[1]


def test_a_search_that_began_again_and_ended_otherwise_takes_nothing_back(served, monkeypatch):
    """As where it did not fit beside others, and the deadline cut it earlier the second time."""
    hear, loop = Handle._report_round, served.server._loop

    def say(handle, report):
        hear(handle, report)
        job = next(iter(served.queue.jobs.values()))
        loop.call_soon_threadsafe(setattr, job, "told", ReplyText(said="\u0001never said"))

    monkeypatch.setattr(Handle, "_report_round", say)
    events = served.stream(seed=1)
    assert events[-1]["error"]["code"] == "search_failed"
    assert text_of(events[:-1]) == "\u0001never said"
    body = {"model": "tiny", "input": ASKED, "seed": 1, "stream": True}
    assert "event: response.failed" in served.http.post("/v1/responses", json=body).text

"""That every request is answered, whatever happens to the thread that searches, or beside it."""

import io
import json
import logging
import socket
import threading

import httpx
import pytest

from beamwright.errors import Cancelled
from beamwright.serve.body import ServerLimits
from beamwright.serve.choices import ChoiceChunks
from beamwright.serve.guard import JsonLines
from beamwright.serve.server import bind
from beamwright.solver.handle import Handle
from beamwright.solver.scheduler import RequestScheduler
from engines import assert_nothing_allocated
from served import ASKED, held, text_of, until


class Raises:
    """A listener that fails at one thing."""

    def __init__(self, at):
        self.at = at

    def begun(self, job):
        del job
        assert self.at != "begun"

    def round(self, job, report):
        del job, report
        assert self.at != "round"

    def ended(self, job, outcome):
        del job, outcome
        assert self.at != "ended"


@pytest.mark.parametrize("at", ["begun", "round", "ended"])
def test_a_listener_that_raises_is_nobody_else_s(serve, at, caplog):
    server = serve()
    with caplog.at_level(logging.ERROR, "beamwright.serve"):
        server.queue.listeners.insert(0, Raises(at))
        found = server.chat(seed=1)
        assert found.status_code == 200
        server.queue.listeners.pop(0)
        runs = server.http.get("/feed/searches").json()["searches"]
    assert [run["state"] for run in runs] == ["done"], "the feed heard of it all the same"
    assert f"{at} of Raises" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_thread_that_dies_leaves_nobody_waiting_and_another_takes_over(serve, monkeypatch, error):
    server, statuses = serve(), []

    def ask():
        statuses.append(server.chat().status_code)

    with held() as gate:
        server.queue.listeners.append(gate)
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: gate.reached and len(server.queue.jobs) == 3)

        def fail(*args):
            raise error

        monkeypatch.setattr(RequestScheduler, "_settle", fail)
    for thread in threads:
        thread.join(30)
    assert statuses == [500] * 3
    monkeypatch.undo()
    assert server.chat(seed=1).status_code == 200
    assert_nothing_allocated(server.solver)


def test_what_went_wrong_is_logged_with_the_request_s_id(serve, monkeypatch):
    server, lines, log = serve(), io.StringIO(), logging.getLogger("beamwright.serve")
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonLines())
    log.addHandler(handler)
    monkeypatch.setattr(RequestScheduler, "_settle", lambda *args: 1 // 0)
    try:
        response = server.chat()
    finally:
        log.removeHandler(handler)
    (logged,) = (json.loads(line) for line in lines.getvalue().splitlines())
    assert logged["request"] == response.headers["x-request-id"]
    assert "ZeroDivisionError" in logged["error"]


def test_a_thread_that_cannot_start_fails_that_request_alone(serve, monkeypatch):
    server = serve()
    start = threading.Thread.start

    def fail(thread):
        if thread.name == "solver":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert server.chat().status_code == 500
    assert not server.queue.jobs
    monkeypatch.undo()
    assert server.chat(seed=1).status_code == 200


def test_a_prompt_that_is_being_looked_at_has_a_place(serve, monkeypatch):
    server = serve(limits=ServerLimits(requests=1, drain_s=5.0))
    looked, go_on, prompt_tokens = threading.Event(), threading.Event(), server.solver.prompt_tokens

    def slow(problem):
        looked.set()
        go_on.wait(30)
        return prompt_tokens(problem)

    monkeypatch.setattr(server.solver, "prompt_tokens", slow)
    statuses = []
    first = threading.Thread(target=lambda: statuses.append(server.chat(seed=1).status_code))
    first.start()
    assert looked.wait(30)
    assert server.chat().status_code == 429
    go_on.set()
    first.join(30)
    assert statuses == [200]
    assert server.chat(seed=1).status_code == 200


@pytest.fixture
def slow_submit(monkeypatch):
    """Has a server's engine take its time to submit: `come` when it does, until `go_on`."""

    class Slow:
        def __init__(self):
            self.come, self.go_on = threading.Event(), threading.Event()
            self.handles = []

        def within(self, server):
            submit = server.solver.submit

            def slow(*args, **options):
                self.come.set()
                self.go_on.wait(30)
                self.handles.append(submit(*args, **options))
                return self.handles[-1]

            monkeypatch.setattr(server.solver, "submit", slow)
            return server

    slow = Slow()
    yield slow
    slow.go_on.set()


def test_what_takes_long_to_submit_holds_up_nobody(serve, slow_submit):
    server, statuses = slow_submit.within(serve()), []
    asking = threading.Thread(target=lambda: statuses.append(server.chat(seed=1).status_code))
    asking.start()
    assert slow_submit.come.wait(30)
    assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
    slow_submit.go_on.set()
    asking.join(30)
    assert statuses == [200]


def test_a_server_ends_while_a_search_is_submitted(serve, slow_submit):
    server, statuses = slow_submit.within(serve(limits=ServerLimits(drain_s=0.0))), []
    asking = threading.Thread(target=lambda: statuses.append(server.chat(seed=1).status_code))
    asking.start()
    assert slow_submit.come.wait(30)
    server.server.handle_exit(15, None)
    until(lambda: server.queue.draining)
    slow_submit.go_on.set()
    asking.join(30)
    server.thread.join(30)
    assert statuses == [503]
    (handle,) = slow_submit.handles
    with pytest.raises(Cancelled):
        handle.result(30)
    assert_nothing_allocated(server.solver)


def test_one_key_leaves_places_to_the_others(serve):
    limits = ServerLimits(requests=3, requests_per_key=1, drain_s=5.0)
    server, statuses = serve(limits=limits, keys=["a", "b"]), []

    def ask(key, then=statuses.append):
        body = {"model": "tiny", "messages": [{"role": "user", "content": ASKED}], "seed": 1}
        headers = {"authorization": f"Bearer {key}"}
        url = f"{server.url}/v1/chat/completions"
        found = httpx.post(url, json=body, headers=headers, timeout=60)
        then((key, found.status_code))
        return found

    with held() as gate:
        server.queue.listeners.append(gate)
        threads = [threading.Thread(target=ask, args=(key,)) for key in "ab"]
        for number, thread in enumerate(threads, 1):
            thread.start()
            until(lambda number=number: len(server.queue.jobs) == number)
        refused = ask("a", then=lambda _: None)
        assert refused.status_code == 429
        assert "of this key" in refused.json()["error"]["message"]
    for thread in threads:
        thread.join(60)
    assert sorted(statuses) == [("a", 200), ("b", 200)]


def test_who_waits_when_the_server_ends_may_ask_again(serve):
    server = serve(limits=ServerLimits(drain_s=0.0))
    waiting = []
    with held() as gate:
        server.queue.listeners.append(gate)
        first = threading.Thread(target=server.chat, kwargs={"seed": 1})
        first.start()
        until(lambda: gate.reached)
        second = threading.Thread(target=lambda: waiting.append(server.chat()))
        second.start()
        until(lambda: len(server.queue.jobs) == 2)
        server.server.handle_exit(15, None)
        second.join(30)
    first.join(30)
    (response,) = waiting
    assert (response.status_code, response.headers["retry-after"]) == (503, "30")


def test_a_stream_that_fails_is_logged_and_cut(serve, monkeypatch, caplog):
    server = serve()
    monkeypatch.setattr(ChoiceChunks, "_role", lambda *args: 1 // 0)
    monkeypatch.setattr("beamwright.serve.endpoint.told_error", lambda *args: 1 // 0)
    with caplog.at_level(logging.ERROR), pytest.raises(httpx.RemoteProtocolError):
        server.stream()
    until(lambda: "ZeroDivisionError" in caplog.text)
    until(lambda: not server.queue.jobs)


def test_who_is_told_of_the_server_can_come_at_once():
    with bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        pass


def test_who_leaves_in_the_middle_of_a_body_is_no_bug(served, caplog):
    with caplog.at_level(logging.ERROR):
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n"
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(f"{head}content-type: application/json\r\n\r\n{{".encode())
        assert served.http.get("/health").status_code == 200
    assert not caplog.records


def test_what_is_over_holds_no_tree(served):
    served.chat(seed=1)
    run = served.http.get("/feed/searches").json()["searches"][0]["id"]
    feed = next(each for each in served.queue.listeners if hasattr(each, "runs"))
    until(lambda: feed.run(run).ended)
    assert feed.run(run).job is None


def test_fewer_candidates_than_choices_end_properly(served):
    fields = {"n": 8, "search": {"token_budget": 1}, "model": "tiny:best-of-n", "seed": 1}
    whole, events = served.chat(**fields).json(), served.stream(**fields)
    told = {c["index"] for event in events for c in event["choices"]}
    ends = {c["index"] for e in events for c in e["choices"] if c["finish_reason"]}
    assert told == ends == {choice["index"] for choice in whole["choices"]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_search_that_began_again_and_ended_otherwise_takes_nothing_back(
    served, monkeypatch, path
):
    """As where it did not fit beside others, and the deadline cut it earlier the second time."""
    hear = Handle._hear

    def say(handle, report):
        hear(handle, report)
        job = next(iter(served.queue.jobs.values()))
        loop.call_soon_threadsafe(setattr, job, "text", "\u0001never said")

    loop = served.server._loop
    monkeypatch.setattr(Handle, "_hear", say)
    if path.endswith("responses"):
        body = {"model": "tiny", "input": ASKED, "seed": 1, "stream": True}
        with served.http.stream("POST", path, json=body) as response:
            assert "response.failed" in list(response.iter_lines())[-3]
    else:
        events = served.stream(seed=1)
        assert events[-1]["error"]["code"] == "search_failed"
        assert text_of(events[:-1]) == "\u0001never said"

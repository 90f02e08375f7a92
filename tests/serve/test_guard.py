"""Who is refused at the door, and that a server outlives whatever is sent to it."""

import json
import logging
import socket
import time
from contextlib import ExitStack

import httpx
import pytest

from beamwright.serve import server as connections
from beamwright.serve.body import ServerLimits
from beamwright.serve.server import Guard
from served import BODY, held, until
from tables import beside

CASES = beside(__file__)

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(("headers", "status"), CASES["door"])
def test_the_door(served, headers, status):
    sent = {"content-type": "application/json", **headers}
    response = served.http.post(CHAT, content=json.dumps(BODY), headers=sent)
    assert response.status_code == status
    assert ("choices" if status == 200 else "error") in response.json()
    assert "access-control-allow-origin" not in response.headers
    assert response.headers["x-content-type-options"] == "nosniff"


def test_keys(serve):
    server = serve(keys=["one key", "another"])
    for given, kept in (("abc-1", True), ("x" * 200, False), ('a"b', False)):
        found = server.http.get("/health", headers={"x-request-id": given}).headers["x-request-id"]
        assert (found == given) == kept, "ids of requests are kept if they are harmless"
    for authorization in ("", "Bearer", "Bearer wrong", "Bearer one", "Basic another", "another"):
        with httpx.Client(base_url=server.url, headers={"authorization": authorization}) as http:
            response = http.post(CHAT, json=BODY)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
    with httpx.Client(base_url=server.url) as http:
        for path in ("/", "/docs", "/health", "/ready", "/page/main.js"):
            assert http.get(path).status_code == 200
        for path in ("healthy", "v1/models", "metrics", "page", "feed/searches", "openapi.json"):
            assert http.get(f"/{path}").status_code == 401
    with httpx.Client(base_url=server.url, headers={"authorization": "bearer another"}) as http:
        assert http.get("/v1/models").status_code == 200


def test_a_key_sees_and_cancels_its_own_searches_alone(serve):
    server = serve(keys=["mine", "yours"])
    yours = httpx.Client(base_url=server.url, headers={"authorization": "bearer yours"}, timeout=60)
    with yours, held(server) as gate:
        asked = {"problem": "a private matter", "options": {"seed": 1}}
        found = server.http.post("/feed/searches", json=asked).json()["id"]
        until(lambda: gate.reached)
        assert yours.get("/feed/searches").json()["searches"] == []
        for method in ("GET", "DELETE"):
            assert yours.request(method, f"/feed/searches/{found}").status_code == 404
        (job,) = server.queue.jobs.values()
        assert not job.handle._request.cancelled
        (mine,) = server.http.get("/feed/searches").json()["searches"]
        assert (mine["id"], mine["state"]) == (found, "running")
        assert server.http.delete(f"/feed/searches/{found}").status_code == 200
        assert job.handle._request.cancelled
    until(lambda: not server.queue.jobs)
    assert server.http.get("/feed/searches").json()["searches"][0]["state"] == "cancelled"


def test_a_key_may_be_of_any_characters():
    guard = Guard(None, ServerLimits(), [], ["sesam \u00f6ffne dich \u2603", "another"])
    sent = "sesam \u00f6ffne dich \u2603".encode().decode("latin-1")  # as a header is read
    owners = {guard.owner(f"Bearer {each}") for each in (sent, "another")}
    assert len(owners) == 2
    assert None not in owners
    assert guard.owner("Bearer sesam \u00f6ffne dich") is None


def test_keys_and_prompts_are_in_no_log(serve, caplog):
    server = serve(keys=["top secret key"])
    with caplog.at_level(logging.DEBUG, "beamwright.serve"):
        secret = {**BODY, "messages": [{"role": "user", "content": "a private matter"}]}
        for address, fields, status in (
            (CHAT, {}, 200),
            (f"{CHAT}?key=top+secret+key", {"n": 0}, 400),
        ):
            assert server.http.post(address, json={**secret, **fields}).status_code == status
    logged = "\n".join(str(vars(record)) for record in caplog.records)
    assert "/v1/chat/completions" in logged
    assert "secret" not in logged
    assert "private" not in logged


def test_a_body_that_is_too_large_is_refused_with_and_without_a_length(serve):
    server = serve(limits=ServerLimits(body_bytes=10_000, drain_s=5.0))
    headers = {"content-type": "application/json"}
    large = b'{"model": "' + b"x" * 20_000 + b'"}'
    assert server.http.post(CHAT, content=large, headers=headers).status_code == 413
    for path, refused in ((CHAT, (413,)), ("/feed/searches", (400, 413))):
        pieces = (large[at : at + 1000] for at in range(0, len(large), 1000))
        assert server.http.post(path, content=pieces, headers=headers).status_code in refused
    assert server.http.post(CHAT, json=BODY).status_code == 200


def test_a_head_has_to_come(served, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for first, begun in ((b"", b""), (b"", b"GET /hea"), (health, b"GET /hea")):
        with served.connect() as client:
            client.sendall(first)
            assert not first or client.recv(1000).startswith(b"HTTP/1.1 200")
            client.sendall(begun)
            while client.recv(1000):  # until it is closed
                pass
    # A body may take longer, and so may a search.
    head, data = served.raw(json.dumps(BODY).encode(), connection="close")
    with served.connect() as client:
        client.sendall(head + data[:5])
        time.sleep(0.4)
        client.sendall(data[5:])
        found = b"".join(iter(lambda: client.recv(1000), b""))
    assert found.startswith(b"HTTP/1.1 200")


def test_a_request_with_two_lengths_is_refused_and_what_is_behind_it_is_not_read(served):
    inner = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head, _ = served.raw(inner, transfer_encoding="chunked")
    with served.connect() as client:
        client.sendall(head + b"0\r\n\r\n" + inner)
        found = b"".join(iter(lambda: client.recv(1000), b""))
    assert found.startswith(b"HTTP/1.1 400")
    assert b"send either content-length or transfer-encoding, not both" in found
    assert found.count(b"HTTP/1.1") == 1


def test_large_bodies_are_bounded_together_and_small_ones_pass(serve):
    server = serve(limits=ServerLimits(bodies_bytes=200_000, drain_s=5.0))
    padded = json.dumps({**BODY, "user": "x" * 200_000}).encode()
    head, _ = server.raw(padded, connection="close")
    headers = {"content-type": "application/json"}
    with server.connect() as client:
        client.sendall(head + padded[:-1])
        until(lambda: server.app._bodies_bytes > 100_000)
        refused = server.http.post(CHAT, content=padded, headers=headers)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert server.http.post(CHAT, json=BODY).status_code == 200
        client.sendall(padded[-1:])
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
    until(lambda: server.app._bodies_bytes == 0)
    assert server.http.post(CHAT, content=padded, headers=headers).status_code == 200


def test_who_has_been_silent_longest_makes_room(serve, monkeypatch):
    server = serve()
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)

    def connect():
        return stack.enter_context(server.connect())

    def is_served(client):
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        found = b""
        while not found.endswith(b"}"):
            found += client.recv(1000)
        return found.startswith(b"HTTP/1.1 200")

    with ExitStack() as stack:
        first, second = connect(), connect()
        assert all(map(is_served, (first, second, first)))
        third = connect()
        assert second.recv(1000) == b"", "heard longest ago"
        assert all(map(is_served, (first, third)))


def test_what_is_no_http_or_stops_halfway(served):
    for raw in (
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n"
        b"content-type: application/json\r\n\r\n{",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 200_000,
    ):
        with served.connect() as client:
            try:
                client.sendall(raw)
                client.shutdown(socket.SHUT_WR)
                client.settimeout(5)
                client.recv(1000)
            except OSError:
                pass
    assert served.http.post(CHAT, json=BODY).status_code == 200
    assert not served.queue.jobs

"""What a server says over HTTP to be pinned: replies, a stream, and the feed of the live page."""

import functools
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx

from golden_commands import PROBLEM, masked

SERVER = ["--port", "0", "--dtype", "float64", "--n", "4", "--width", "2", "--json"]
ASKED = {"messages": [{"role": "user", "content": PROBLEM}], "model": "bundled", "seed": 3}
PATIENCE_S = 240.0
OF_THE_MOMENT = (
    *("/id", "/kinds/*/id", "/searches/*/id", "/[0-9]*/id", "*/created", "*/started"),
    *("*_s", "*/seconds", "*/system_fingerprint"),
    *("*/receipt/machine/processor", "*/receipt/versions/*"),
)
"""Names of searches, instants, durations and rates; the fingerprint is of the version, too."""


@contextmanager
def running():
    """A client of a server in a process of its own."""
    command = [sys.executable, "-m", "beamwright", "serve", *SERVER]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=one_thread, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = json.loads(server.stdout.readline())["url"]
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
                yield http
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=PATIENCE_S)


def streamed(http, **fields):
    """The events of a chat's stream."""
    body = {**ASKED, "stream": True, "stream_options": {"include_usage": True}, **fields}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def shape(value):
    """Its keys alone."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return [shape(inner) for inner in value] if isinstance(value, list) else None


def pieces_of(events):
    """A stream's text, and the first event of each shape, in order.

    How much of a text comes in one event depends on who is quicker, the search or who reads it.
    """
    first = {repr(shape(event)): event for event in reversed(events)}
    kinds = [event for event in events if event is first[repr(shape(event))]]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    text = "".join(delta.get("content", "") for delta in deltas)
    return {"kinds": masked(kinds, ("*/delta/content",)), "text": text}


def rounds_of(events):
    """The rounds that a stream tells of."""
    return [event["search"] for event in events if "number" in event.get("search", ())]


def fed(http):
    """The events of a search that the page asks for, until it is over."""
    asked = {"problem": PROBLEM, "options": {"n": 4, "width": 2, "seed": 3}}
    run = http.post("/feed/searches", json=asked).json()
    return [json.loads(line) for line in http.get(f"/feed/searches/{run['id']}").text.splitlines()]


def figures(http):
    """What the page shows beside the searches; a search may still be clearing up."""
    found = http.get("/feed/gauges").json()
    return masked(found, ("/gauges/*/value",), zeros=False)


CASES = {
    "a reply": lambda http: http.post("/v1/chat/completions", json=ASKED).json(),
    "a stream": lambda http: pieces_of(streamed(http)),
    "rounds of a stream": lambda http: rounds_of(streamed(http, search={"events": True})),
    "a search of the page": fed,
    "searches so far": lambda http: http.get("/feed/searches").json(),
    "figures of the moment": figures,
    "models": lambda http: http.get("/v1/models").json(),
}
"""Asked for in this order."""


@functools.cache
def all_said():
    """What one server says, asked for all cases in turn."""
    with running() as http:
        return {case: masked(ask(http), OF_THE_MOMENT) for case, ask in CASES.items()}


def said(name):
    """What a server says to a case."""
    return all_said()[name]

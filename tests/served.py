"""A real server in a thread, with a real solver, for tests that are real clients."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager

import httpx

from beamwright.serve.app import make_app
from beamwright.serve.body import ServerLimits
from beamwright.serve.guard import Doors, Guard
from beamwright.serve.queue import RequestQueue
from beamwright.serve.server import Server, bind

HOSTS = {"localhost"}
ASKED = "Ann has 12 apples. She eats 3 and buys as many again. How many apples has she?"
"""Not from the problem set: answers may be wrong."""

PATIENCE = 240.0
"""Seconds until what does not come is taken for broken: a busy machine takes its time."""


class Served:
    """A running server. http: a client of it."""

    def __init__(self, solver, limits=None, keys=(), hosts=HOSTS, name="tiny"):
        self.solver, self.limits = solver, limits or ServerLimits(drain_s=5.0)
        self.queue = RequestQueue(solver, name, self.limits)
        self.app = Guard(make_app(self.queue), Doors.of(hosts, keys), self.limits)
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(self.app, self.queue)
        self.thread = threading.Thread(target=self._run, daemon=True)
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE)

    def _run(self):
        asyncio.run(self.server.serve(sockets=[self.socket]))

    def __enter__(self):
        self.thread.start()
        until(lambda: self.server.started)
        return self

    def __exit__(self, *error):
        self.http.close()
        if self.thread.is_alive():
            self.server.handle_exit(15, None)
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.socket.close()

    def chat(self, text=ASKED, *, model="tiny", **fields):
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def stream(self, path="/v1/chat/completions", **body):
        """The events of a stream, but for comments, and whether it was ended properly."""
        if path.endswith("chat/completions"):
            body = {"model": "tiny", "messages": [{"role": "user", "content": ASKED}], **body}
        with self.http.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        events = [line.removeprefix("data: ") for line in lines]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]


def text_of(events, index=0):
    """What a chat's stream says."""
    pieces = [c["delta"].get("content") or "" for e in events for c in e["choices"]
              if c["index"] == index]  # fmt: skip
    return "".join(pieces)


def until(holds, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


class Gate:
    """A listener in whose first round a search stays, until it is opened. reached: it has come."""

    def __init__(self):
        self.opened, self.arrived = threading.Event(), threading.Event()

    @property
    def reached(self):
        return self.arrived.is_set()

    def begun(self, job):
        del job

    def round(self, job, report):
        del job, report
        self.arrived.set()
        self.opened.wait(PATIENCE)

    def ended(self, job, outcome):
        del job, outcome


@contextmanager
def held():
    """A gate that opens when the context ends."""
    gate = Gate()
    try:
        yield gate
    finally:
        gate.opened.set()

"""A real server in a thread, with a real solver, for tests that are real clients."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import httpx

from beamwright.serve.app import make_app
from beamwright.serve.body import ServerLimits
from beamwright.serve.queue import RequestQueue
from beamwright.serve.server import Guard, Server, bind

ASKED = "Ann has 12 apples. She eats 3 and buys as many again. How many apples has she?"
"""Not from the problem set: answers may be wrong."""

BODY = {"model": "tiny", "messages": [{"role": "user", "content": ASKED}], "seed": 1}

PATIENCE = 240.0
"""Seconds until what does not come is taken for broken: a busy machine takes its time."""


class Served:
    """A running server. http: a client of it."""

    def __init__(self, solver, limits=None, keys=()):
        self.solver, self.limits = solver, limits or ServerLimits(drain_s=5.0)
        self.queue = RequestQueue(solver, "tiny", self.limits)
        self.app = Guard(make_app(self.queue), self.limits, {"localhost"}, keys)
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(self.app, self.queue)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.threads = ThreadPoolExecutor(8)
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
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.socket.close()

    def chat(self, text=ASKED, *, model="tiny", **fields):
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def later(self, *, key=None, **fields):
        """A chat that another thread asks for: the future of its response."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": ASKED}], **fields}
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        post = partial(self.http.post, "/v1/chat/completions", json=body, headers=headers)
        return self.threads.submit(post)

    def raw(self, body, path="/v1/chat/completions", **headers):
        """The bytes of a request's head, and of its body."""
        lines = {"host": "localhost", "content-type": "application/json"}
        lines |= {"content-length": len(body), **headers}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode(), body

    def connect(self):
        """A socket of a client."""
        client = socket.create_connection(("127.0.0.1", self.port))
        client.settimeout(60)
        return client

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

    def on_begun(self, job): ...

    def on_round(self, job, report):
        self.arrived.set()
        self.opened.wait(PATIENCE)

    def on_ended(self, job, outcome): ...


@contextmanager
def held(server=None):
    """A gate that opens when the context ends; searches of the server come to it."""
    gate = Gate()
    if server is not None:
        server.queue.listeners.append(gate)
    try:
        yield gate
    finally:
        gate.opened.set()
        if server is not None:
            server.queue.listeners.remove(gate)

"""What is asked for to be pinned, on the command line and over HTTP, and what is masked of it."""

import functools
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from fnmatch import fnmatchcase
from pathlib import Path

import httpx

from beamwright.cli import main
from tables import beside


def masked(value, places, place="", *, zeros=True):
    """A JSON value, with the name of its type for every number and text at one of these places.

    places: patterns of paths such as /time/total_s; * is any number of characters. Null stays, and
    so does 0 (or "") unless zeros is False: that a figure stops or begins to apply, is noticed.
    """
    if isinstance(value, dict):
        return {k: masked(v, places, f"{place}/{k}", zeros=zeros) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(v, places, f"{place}/{i}", zeros=zeros) for i, v in enumerate(value)]
    if value is None or (zeros and not value) or not any(fnmatchcase(place, p) for p in places):
        return value
    return f"<{type(value).__name__}>"


CASES = beside(__file__)
"""By command, the words behind it, by case."""
MASKS = CASES.pop("masks")

PROBLEM = (
    "Jack has 70 eggs. In April Jack gets 9 eggs. In May Jack sells 19 eggs. "
    "How many eggs does Jack have now?"
)


def called(words):
    """Exit code, standard output and standard error of a command, JSON wherever it succeeds."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([*words, "--json"])
    return code, out.getvalue(), err.getvalue()


def printed(*words):
    """The JSON object that a command prints."""
    code, out, err = called(words)
    assert code == 0, err
    return json.loads(out)


def simulated(name):
    """What `beamwright simulate` says of a case."""
    words = CASES["simulate"][name].split()
    card = [] if "--gpu" in words else ["--gpu", "rtx-4090"]
    return printed("simulate", *words, *card)


def planned(name):
    """What `beamwright plan` says of a case; of what cannot be planned, how it is refused."""
    code, out, err = called(["plan", *CASES["plan"][name].split()])
    if code:
        return {"code": code, "printed": out, "error": err}
    return masked(json.loads(out), ("why",))  # of a host that may have been measured


def solved(name):
    """What `beamwright solve` says of a case."""
    found = printed("solve", PROBLEM, "--dtype", "float64", *CASES["solve"][name].split())
    return masked(found, MASKS["solve"])


def evaluated(name):
    """What `beamwright eval` says of a case, the records that it writes, and its files."""
    words = CASES["eval"][name].split()
    hidden = MASKS["eval"] if words else MASKS["eval"] + MASKS["in flight"]
    with tempfile.TemporaryDirectory() as folder:
        given = ["--limit", "3", "--n", "4", "--dtype", "float64", *words, "--out", folder]
        report = printed("eval", "bundled:test", *given)
        lines = (Path(folder) / "results.jsonl").read_text(encoding="utf-8").splitlines()
        files = sorted(path.name for path in Path(folder).iterdir())
    records = sorted((json.loads(line) for line in lines), key=lambda record: record["index"])
    shown = [masked(each, hidden, zeros=bool(words)) for each in (report, *records)]
    return {"report": shown[0], "records": shown[1:], "files": files}


# --- a server: replies, a stream, and the feed of the live page ----------------------------------

SERVER = ["--port", "0", "--dtype", "float64", "--n", "4", "--width", "2", "--json"]
ASKED = {"messages": [{"role": "user", "content": PROBLEM}], "model": "bundled", "seed": 3}
PATIENCE_S = 240.0


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


SERVED = {
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
        return {case: masked(ask(http), MASKS["serve"]) for case, ask in SERVED.items()}


def said(name):
    """What a server says to a case."""
    return all_said()[name]

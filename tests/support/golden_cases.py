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


_SEARCH = "--n 32 --width 4 --generate 256 --step-tokens 32"
_LONG = "--model qwen2.5-1.5b --n 16 --width 4 --prompt 6000 --generate 128 --kv-memory 180MiB"
_OPT = f"--model opt-6.7b {_SEARCH}"
_QWEN = f"--model qwen2.5-1.5b {_SEARCH}"
_SCORED = f"{_QWEN} --verifier skywork-prm-1.5b"
_LAYERWISE = "--schedules locality,layerwise/tree"
SIMULATED = {
    "lbs and its parts": f"{_OPT} --kv-memory 950MiB --ablation --engines none",
    "every engine": f"{_OPT} --kv-memory 900MiB --schedules locality/tree "
    "--engines vllm,vllm-offload,sglang,sglang-hicache,sglang-write-back,clairvoyant",
    "hardly any memory, barriers": f"{_QWEN} --kv-memory 14MiB {_LAYERWISE} --engines none "
    "--batching grouped",
    "speculation, scored ahead": f"{_SCORED} --kv-memory 160MiB --step-spread 0.5 "
    "--speculation exact --verify-ahead slack --schedules in-gpu,locality",
    "speculation, dvts, moving memory": f"{_SCORED} --kv-memory 90MiB --speculation exact "
    "--search dvts --split auto --schedules locality",
    "moving memory, dynamic": f"{_SCORED} --kv-memory 70MiB --split auto --search dynamic "
    "--survival score --schedules locality,layerwise",
    "fixed split, particles, few rows": f"{_SCORED} --kv-memory 110MiB --split 0.6 "
    "--search particles --max-batch 5 --schedules in-gpu,locality",
    "split by need, eager": f"{_SCORED} --kv-memory 90MiB --split auto --write-back eager "
    f"{_LAYERWISE} --seed 1",
    "best of n, lru": f"{_QWEN} --kv-memory 80MiB --search best-of-n --step-spread 1 --victims lru "
    "--batching continuous --schedules locality/tree --engines vllm-offload,sglang-hicache",
    "by cost, lazy, slow link, another card": f"{_QWEN} --kv-memory 30MiB --victims cost "
    "--write-back lazy --link-bandwidth 4GB/s --gpu custom:12GB,360GB/s,25TFLOPS "
    "--weights int8 --schedules locality --engines none",
    "sparse, a query ahead": f"{_LONG} --sparse ahead --select 512 "
    "--schedules locality/tree,layerwise/tree,in-gpu/tree",
    "sparse, predicted": f"{_LONG} --sparse asyncspade --select 1/8 --sparse-from 1024 "
    "--schedules locality/tree",
}

_PLANNED = "--n 16 --generate 1024"
_SKYWORK = "--verifier Skywork-o1-Open-PRM-Qwen-2.5-1.5B"
PLANNED = {
    "no verifier": f"--model qwen2.5-1.5b --gpu rtx-3060 {_PLANNED}",
    "with a verifier": f"--model Qwen2.5-1.5B-Instruct {_SKYWORK} --gpu rtx-3060 {_PLANNED}",
    "any card, int4 verifier, a change is advised": "--model Llama-3.2-1B-Instruct "
    "--verifier Llama3.1-8B-PRM-Deepseek-Data --verifier-weights int4 "
    "--gpu custom:12GB,360GB/s,25TFLOPS --n 64 --generate 1024",
    "no card": f"--model Qwen2.5-0.5B-Instruct {_SKYWORK} --gpu epyc-2core --memory 16GiB --n 8 "
    "--generate 512",
    "int8, split by need": f"--model qwen2.5-7b {_SKYWORK} --weights int8 "
    f"--gpu rtx-4070-ti-super {_PLANNED} --split auto",
    "weights alone are too much": f"--model qwen2.5-7b --gpu rtx-4060 {_PLANNED}",
    "hardly any memory for KV": "--model opt-6.7b --gpu rtx-4090 --n 64 --generate 1920 "
    "--kv-memory 200MiB",
}

PROBLEM = (
    "Jack has 70 eggs. In April Jack gets 9 eggs. In May Jack sells 19 eggs. "
    "How many eggs does Jack have now?"
)
SOLVED = {
    "beam": "--n 8",
    "locality": "--n 4 --width 2 --schedule locality --kv-memory 560KiB",
    "layerwise": "--n 4 --width 2 --schedule layerwise --kv-memory 900KiB",
    "majority": "--n 8 --search majority --verifier none",
    "sparse": "--n 4 --sparse exact --select 64 --sparse-from 64",
    "speculation": "--n 8 --speculation exact",
}
_OF_HERE = ("*/receipt/machine/processor", "*/receipt/versions/*")
_OF_TIME = ("/time/*", "/goodput_tok_s", "/io_share", *_OF_HERE)
_AS_THREADS_RUN = ("/kv/d2h_bytes",)
"""Tokens go to the host while others are written: how many of those that do not have to go, is as
it happens."""

EVALUATED = {"three in flight": "", "one by one": "--in-flight 1"}
_OF_TIMES = (
    *("/time/*", "*/goodput_tok_s", "/precise_goodput_tok_s/*", "/latency_s/*", "/completion_s/*"),
    "/per_problem/seconds/*",
    *_OF_HERE,
)
_AS_THEY_MEET = (
    *("/tokens/overrun", "/per_problem/kv_device_peak_bytes/*", "/kv/device_peak_bytes"),
    *("/kv/scratch_peak_bytes", "/kv/groups"),
)
"""Who is decoded beside whom is as it happens."""


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
    words = SIMULATED[name].split()
    card = [] if "--gpu" in words else ["--gpu", "rtx-4090"]
    return printed("simulate", *words, *card)


def planned(name):
    """What `beamwright plan` says of a case; of what cannot be planned, how it is refused."""
    code, out, err = called(["plan", *PLANNED[name].split()])
    if code:
        return {"code": code, "printed": out, "error": err}
    return masked(json.loads(out), ("why",))  # of a host that may have been measured


def solved(name):
    """What `beamwright solve` says of a case."""
    found = printed("solve", PROBLEM, "--dtype", "float64", *SOLVED[name].split())
    return masked(found, (*_OF_TIME, *_AS_THREADS_RUN))


def evaluated(name):
    """What `beamwright eval` says of a case, the records that it writes, and its files."""
    words = EVALUATED[name].split()
    hidden = _OF_TIMES if words else (*_OF_TIMES, *_AS_THEY_MEET)
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
        return {case: masked(ask(http), OF_THE_MOMENT) for case, ask in SERVED.items()}


def said(name):
    """What a server says to a case."""
    return all_said()[name]

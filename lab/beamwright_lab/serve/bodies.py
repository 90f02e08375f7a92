"""How long a server hears nobody while it reads bodies that are made to be read for long.

Another process asks for `/health` all the time; the longest wait is told beside each body's answer.

    python -m beamwright_lab.serve.bodies
    python -m beamwright_lab.serve.bodies --sources ../before/src src
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Event

import httpx

from beamwright_lab.common import finish, say, table
from beamwright_lab.serve.running import server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, tuple[str, Callable[[], str], int]] = {
    "a message is a number, 2 M times": (CHAT, lambda: _body("messages", "1", 1_950_000), 1),
    "the same, three at once": (CHAT, lambda: _body("messages", "1", 1_950_000), 3),
    "a prompt is a list, 1 M times": (COMPLETIONS, lambda: _body("prompt", "[1]", 1_000_000), 1),
    "a message, 40 k times": (
        CHAT,
        lambda: _body("messages", '{"role":"user","content":"How many?"}', 40_000),
        1,
    ),
    "one message of 3.9 MB": (
        CHAT,
        lambda: _body("messages", json.dumps({"role": "user", "content": "a" * 3_900_000}), 1),
        1,
    ),
}


def _body(name: str, item: str, count: int) -> str:
    return f'{{"model":"bundled","{name}":[{",".join([item] * count)}]}}'


def _listen(url: str, over: Event, waits: list[float]) -> None:
    with httpx.Client(base_url=url, timeout=120) as client:
        while not over.is_set():
            begun = time.perf_counter()
            client.get("/health")
            waits.append(time.perf_counter() - begun)
            time.sleep(0.002)


@contextmanager
def _listening(url: str) -> Iterator[list[float]]:
    """The waits for `/health`, in a process that the caller's own work does not hold up."""
    context = get_context("spawn")
    with context.Manager() as manager:
        waits, over = manager.list(), context.Event()
        listener = context.Process(target=_listen, args=(url, over, waits))
        listener.start()
        found: list[float] = []
        try:
            while not waits:
                time.sleep(0.05)
            yield found
        finally:
            over.set()
            listener.join()
            found += waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", nargs="+", default=[""], help="src folders, one a server")
    rows = []
    for source in parser.parse_args().sources:
        if source:
            os.environ["PYTHONPATH"] = source
        with server("--n", "4", "--width", "2") as running:
            for name, (path, make, count) in BODIES.items():
                body = make()
                with _listening(running.url) as waits:
                    time.sleep(1)
                    with ThreadPoolExecutor(count) as pool:
                        ask = partial_post(running.url + path, body)
                        statuses = sorted(set(pool.map(ask, range(count))))
                    time.sleep(0.5)
                row = {
                    "source": source or "installed",
                    "body": name,
                    "MB": round(len(body) / 1e6, 1),
                    "status": ", ".join(map(str, statuses)),
                    "/health median, ms": round(1e3 * statistics.median(waits), 1),
                    "longest, ms": round(1e3 * max(waits), 1),
                }
                rows.append(row)
                say(row)
    print(table(rows, list(rows[0])))
    finish("bodies", {"rows": rows})


def partial_post(url: str, body: str) -> Callable[[int], int]:
    headers = {"content-type": "application/json"}
    return lambda _: httpx.post(url, content=body, headers=headers, timeout=120).status_code


if __name__ == "__main__":
    main()

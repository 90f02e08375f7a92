"""A soak: many requests at a time, some of which leave or run out of time; then SIGTERM.

Requests of all methods, half of them streamed; 5 % hang up in the middle, 2 % have a deadline that
passes. None may be lost: each has an answer, or was cancelled by its client. Resident memory is
read after a tenth of the requests and at the end. Then streams are begun, the server is told to
end, and each of them has to end properly.

    python -m beamwright_lab.serve.soak --requests 1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from statistics import median, quantiles
from typing import Any

import httpx

from beamwright.evaluate.problems import load_problems
from beamwright_lab.common import finish, say
from beamwright_lab.serve.running import Running, server

CHAT, MIB = "/v1/chat/completions", 2**20
LATE = {"deadline": 0.02}
METHODS = ("beam", "dvts", "mcts", "best-of-n", "majority", "particles", "plain")


class Soak:
    """Counts what becomes of requests."""

    def __init__(self, running: Running, http: httpx.AsyncClient, problems: list[str]) -> None:
        self.running, self.http, self.problems = running, http, problems
        self.outcomes: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.wrong: list[str] = []
        self.memory: list[int] = []

    def body(self, number: int) -> dict[str, Any]:
        """The request of this number; the same every time."""
        search: dict[str, Any] = {"n": 8, "width": 4}
        method = METHODS[number % len(METHODS)]
        if number % 50 == 7:
            search |= LATE
        return {
            "model": f"{self.running.facts['models'][0]}:{method}",
            "messages": [{"role": "user", "content": self.problems[number % len(self.problems)]}],
            "seed": number,
            "stream": number % 2 == 0,
            **({} if method == "plain" else {"search": search}),
        }

    async def one(self, number: int) -> None:
        """One request to its end."""
        body, began = self.body(number), time.perf_counter()
        leaves = number % 20 == 3
        try:
            async with asyncio.timeout(0.05 if leaves else 300):
                outcome = await self.answered(body)
        except TimeoutError:
            outcome = "left" if leaves else "lost"
        except httpx.HTTPError as error:
            outcome = "lost"
            self.wrong.append(repr(error))
        self.outcomes[outcome] += 1
        if not leaves:
            self.seconds.append(time.perf_counter() - began)

    async def answered(self, body: dict[str, Any]) -> str:
        """How a request has ended."""
        if not body["stream"]:
            response = await self.http.post(CHAT, json=body)
            if response.status_code != 200:
                self.wrong.append(response.text)
                return f"HTTP {response.status_code}"
            found = response.json()
            late = found["search"]["stop_reason"]
            return "late" if late and "deadline" in late else "answered"
        events = [event async for event in self.events(body)]
        return how_it_ended(events)

    async def events(self, body: dict[str, Any]) -> Any:
        """The data of a stream."""
        async with self.http.stream("POST", CHAT, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")

    async def run(self, num_requests: int, at_a_time: int) -> None:
        """All requests, so many at a time."""
        numbers = iter(range(num_requests))

        async def client() -> None:
            for number in numbers:
                await self.one(number)
                if number == num_requests // 10:
                    self.memory.append(self.running.memory_bytes)

        await asyncio.gather(*(client() for _ in range(at_a_time)))
        while (await self.http.get("/health")).json()["searches"]:
            await asyncio.sleep(0.05)
        self.memory.append(self.running.memory_bytes)

    async def end(self, num_streams: int) -> Counter[str]:
        """Streams that are under way when the server is told to end."""
        first = asyncio.Event()

        async def stream(number: int) -> str:
            found = []
            body = {**self.body(2 * number), "stream": True, "search": {"n": 64, "width": 4}}
            body["model"] = body["model"].partition(":")[0]
            async for event in self.events(body):
                found.append(event)
                first.set()
            return how_it_ended(found)

        streams = [asyncio.create_task(stream(number)) for number in range(num_streams)]
        await first.wait()
        self.running.terminate()
        return Counter(await asyncio.gather(*streams))


def how_it_ended(events: list[str]) -> str:
    """A stream's end: answered, late, or what is wrong with it."""
    if not events or events[-1] != "[DONE]":
        return "broken off"
    chunks = [json.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        return "error"
    if not any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]):
        return "no finish_reason"
    reasons = [chunk["search"].get("stop_reason") for chunk in chunks if "search" in chunk]
    late = any(reason and "deadline" in reason for reason in reasons)
    return "late" if late else "answered"


async def soak(args: argparse.Namespace, running: Running) -> dict[str, Any]:
    problems = [each.problem for each in load_problems("bundled:test", limit=100).problems]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=running.url, timeout=300, limits=limits) as http:
        found, began = Soak(running, http, problems), time.perf_counter()
        await found.run(args.requests, args.at_a_time)
        total_s = time.perf_counter() - began
        metrics = (await http.get("/metrics")).text
        kept = [line for line in metrics.splitlines() if line.startswith("beamwright_kv_bytes{")]
        ended = await found.end(args.at_a_time)
    cuts = quantiles(found.seconds, n=20)
    return {
        "requests": args.requests,
        "outcomes": dict(found.outcomes),
        "p50_s": round(median(found.seconds), 3),
        "p95_s": round(cuts[-1], 3),
        "requests_per_s": round(args.requests / total_s, 2),
        "memory_mib": [round(each / MIB) for each in found.memory],
        "kv_left": kept,
        "wrong": found.wrong[:5],
        "ended_by_sigterm": dict(ended),
        "exit_code": running.process.wait(60),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-a-time", type=int, default=8)
    parser.add_argument("--replicas", type=int, help="of the server; one process without")
    args = parser.parse_args()
    words = [] if args.replicas is None else ["--replicas", str(args.replicas)]
    with server("--n", "16", "--width", "4", *words) as running:
        found = asyncio.run(soak(args, running))
    for name, value in found.items():
        say(name, value)
    finish("serve_soak", {"found": found, "settings": vars(args)})


if __name__ == "__main__":
    main()

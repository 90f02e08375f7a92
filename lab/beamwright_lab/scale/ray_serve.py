"""`serve --replicas` on this machine: its speed beside one process, and replicas that are killed.

`speed`: the same requests, so many at a time, to a server that is one process, and to servers of
one and of two replicas of one core, in turns. `kills`: while requests are under way, half of them
streamed, a replica's process is killed (SIGKILL), and again when it has been replaced; each has to
be answered with the tree that an undisturbed server grows.

    python -m beamwright_lab.scale.ray_serve --requests 60 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx

from beamwright.evaluate import load_problems
from beamwright_lab.common import finish, say
from beamwright_lab.serve.running import Running, server

CHAT = "/v1/chat/completions"
SEARCH = ("--n", "16", "--width", "4")
SIDES = {"one process": (), "one replica": ("--replicas", "1"), "two replicas": ("--replicas", "2")}


class Client:
    """Asks a server for searches, and notes how long each took and which tree it has grown."""

    def __init__(self, running: Running, http: httpx.AsyncClient, problems: list[str]) -> None:
        self.running, self.http, self.problems = running, http, problems
        self.seconds: list[float] = []
        self.trees: dict[int, str] = {}

    async def one(self, number: int, *, stream: bool) -> None:
        """A request of this number is always the same."""
        messages = [{"role": "user", "content": self.problems[number % len(self.problems)]}]
        body = {"model": "bundled", "messages": messages, "seed": number, "stream": stream}
        began = time.perf_counter()
        self.trees[number] = await self._tree(body)
        self.seconds.append(time.perf_counter() - began)

    async def many(self, numbers: range, at_a_time: int, *, streams: bool = False) -> None:
        """So many at a time; with streams every other one is."""
        left = iter(numbers)

        async def client() -> None:
            for number in left:
                await self.one(number, stream=streams and number % 2 == 0)

        await asyncio.gather(*(client() for _ in range(at_a_time)))

    async def _tree(self, body: dict[str, Any]) -> str:
        """Hash of the tree, or what is wrong."""
        if not body["stream"]:
            response = await self.http.post(CHAT, json=body)
            if response.status_code != 200:
                return f"HTTP {response.status_code}"
            return str(response.json()["search"]["tree_hash"])
        events = []
        async with self.http.stream("POST", CHAT, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
        if not events or events[-1] != "[DONE]":
            return "broken off"
        chunks = [json.loads(event) for event in events[:-1]]
        if "error" in chunks[-1]:
            return f"error: {chunks[-1]['error']['code']}"
        return next(c["search"]["tree_hash"] for c in reversed(chunks) if "search" in c)


def replicas(running: Running) -> list[int]:
    """Processes of a server's replicas: below its raylet."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            line = (folder / "cmdline").read_bytes() if folder.name.isdecimal() else b""
            above = parent(int(folder.name)) if b"ray::ServeReplica:beamwright" in line else 0
            if above and parent(above) == running.process.pid:
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


def parent(process: int) -> int:
    """The process that has started it."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


async def speed(args: argparse.Namespace, problems: list[str]) -> dict[str, Any]:
    """Requests per second and seconds of each, least and median of the rounds."""
    found: dict[str, list[dict[str, float]]] = {}
    numbers = range(args.requests)
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(server(*SEARCH, *words)) for name, words in SIDES.items()
        }
        for number in range(args.rounds + 1):
            for name, running in sides.items():
                async with httpx.AsyncClient(base_url=running.url, timeout=300) as http:
                    client, began = Client(running, http, problems), time.perf_counter()
                    await client.many(numbers, args.at_a_time)
                    seconds = time.perf_counter() - began
                if number:  # the first round warms up
                    found.setdefault(name, []).append(
                        {
                            "requests_per_s": args.requests / seconds,
                            "p50_s": median(client.seconds),
                            "p95_s": quantiles(client.seconds, n=20)[-1],
                        }
                    )
                    say(name, {key: round(each, 3) for key, each in found[name][-1].items()})
    return {
        name: {
            key: {
                "median": round(median(each[key] for each in rounds), 3),
                "best": round((max if key == "requests_per_s" else min)(e[key] for e in rounds), 3),
            }
            for key in rounds[0]
        }
        for name, rounds in found.items()
    }


async def kills(args: argparse.Namespace, problems: list[str]) -> dict[str, Any]:
    """What becomes of requests while replicas are killed."""
    numbers = range(args.requests)
    with server(*SEARCH, "--replicas", "2") as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=300) as http:
            calm = Client(running, http, problems)
            await calm.many(numbers, args.at_a_time, streams=True)
            client, killed = Client(running, http, problems), []
            asking = asyncio.create_task(client.many(numbers, args.at_a_time, streams=True))
            waits: list[float] = []
            for _ in range(2):
                await asyncio.sleep(1.0)
                killed.append(replicas(running)[0])
                os.kill(killed[-1], signal.SIGKILL)
                waits.append(await replaced(http))
            await asking
            metrics = (await http.get("/metrics")).text
    wanted = ("beamwright_replica_deaths_total", "beamwright_searches_restarted_total")
    lines = [line for line in metrics.splitlines() if line.startswith(wanted)]
    same = sum(client.trees[number] == calm.trees[number] for number in numbers)
    wrong = Counter(tree for tree in client.trees.values() if len(tree) != 64)
    return {
        "requests": args.requests,
        "equal trees": same,
        "not answered": dict(wrong),
        "metrics": lines,
        "replaced after s": [round(each, 1) for each in waits],
        "p50_s": round(median(client.seconds), 2),
        "slowest_s": round(max(client.seconds), 2),
        "p50_s undisturbed": round(median(calm.seconds), 2),
        "slowest_s undisturbed": round(max(calm.seconds), 2),
    }


async def replaced(http: httpx.AsyncClient) -> float:
    """Seconds until a replica is missed, and two are there again."""
    began, missed = time.perf_counter(), False
    while True:
        status = (await http.get("/health")).json()["status"]
        missed = missed or status == "degraded"
        if missed and status == "ok":
            return time.perf_counter() - began
        await asyncio.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--at-a-time", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--what", nargs="+", default=["speed", "kills"])
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    problems = [each.problem for each in load_problems("bundled:test", limit=100).problems]
    report: dict[str, Any] = {"settings": vars(args)}
    for name, measure in {"speed": speed, "kills": kills}.items():
        if name in args.what:
            report[name] = asyncio.run(measure(args, problems))
            say(report[name])
    finish("ray_serve", report)


if __name__ == "__main__":
    main()

"""Clients that ask for too much or leave, against a server of the bundled pair in its own process.

What a door refuses - bodies, heads, keys, hosts - tests/serve holds; here is what takes a server
that searches.

After each attack the server has to be alive, without a search that nobody waits for, without KV,
and no answer may have been a 5xx (but 503, "come later"). Another process asks for `/health` all
the time; its longest wait says how long nobody was heard. The event loop says itself how long one
callback kept it, from 100 ms on (asyncio's debug mode).

    python -m beamwright_lab.serve.attacks
    python -m beamwright_lab.serve.attacks --only fields many_streams
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from beamwright.evaluate import load_problems
from beamwright_lab.common import finish, say, table
from beamwright_lab.serve.running import Running, server

CHAT = "/v1/chat/completions"
OPTIONS = ("--n", "8", "--width", "4", "--max-search-tokens", "20000", "--max-seconds", "20")
COLUMNS = (
    *("attack", "answers", "longest /health, ms", "longest callback, ms", "seconds", "peak MiB"),
    "left over",
)
PROBLEM = load_problems("bundled:test", limit=1).problems[0].problem

Statuses = Counter[str]


class Connected:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> bool:
        """False if the server has hung up."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError:
            return False
        return True

    async def until(self, mark: bytes, seconds: float = 60) -> bytes:
        """What comes, up to this mark or the end."""
        found = b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                while mark not in found and (part := await self.reader.read(65536)):
                    found += part
        return found

    async def status(self, seconds: float = 60) -> str:
        """Of the next answer; how it went without one."""
        head = await self.until(b"\r\n", seconds)
        found = re.match(rb"HTTP/1\.[01] (\d+)", head)
        return found[1].decode() if found else "hung up"

    def reset(self) -> None:
        """Gone without a goodbye."""
        linger = struct.pack("ii", 1, 0)
        sock = self.writer.get_extra_info("socket")
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.close()


class Attacker:
    """Knows where the server is, and what it has answered."""

    def __init__(self, running: Running) -> None:
        self.model = running.facts["models"][0]
        host, _, port = running.url.removeprefix("http://").partition(":")
        self.host, self.port = host, int(port)
        self.statuses: Statuses = Counter()

    async def connect(self, buffer: int | None = None) -> Connected:
        sock = socket.socket()
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
        return Connected(*await asyncio.open_connection(sock=sock))

    def chat(self, **fields: Any) -> dict[str, Any]:
        """A body. Fields in front of what they replace."""
        messages = [{"role": "user", "content": PROBLEM}]
        return {"model": self.model, "messages": messages, **fields}

    def head(self, *lines: str, path: str = CHAT, host: str = "localhost") -> bytes:
        kind = "content-type: application/json"
        return "\r\n".join(
            [f"POST {path} HTTP/1.1", f"host: {host}", kind, *lines, "", ""]
        ).encode()

    def raw(self, body: dict[str, Any] | bytes, *lines: str, path: str = CHAT) -> bytes:
        """A whole request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head(f"content-length: {len(data)}", *lines, path=path) + data

    async def ask(self, request: bytes, seconds: float = 60) -> str:
        """Send it, and count how it is answered."""
        client = await self.connect()
        await client.send(request)
        status = await client.status(seconds)
        client.reset()
        self.statuses[status] += 1
        return status

    async def begun(self, **fields: Any) -> Connected:
        """A stream that has been asked for."""
        client = await self.connect()
        await client.send(self.raw(self.chat(stream=True, **fields)))
        return client

    async def leaves_in_a_round(self) -> None:
        """When the first round has been told of."""
        for number in range(10):
            client = await self.begun(seed=number, search={"n": 32, "events": True})
            await client.until(b'"reasoning"')
            client.reset()

    async def leaves_at_the_end(self) -> None:
        """With the last chunk."""
        for number in range(10):
            client = await self.begun(seed=number)
            await client.until(b'"finish_reason": "stop"')
            client.reset()

    async def reads_slowly(self) -> None:
        """8 streams with much to say, a byte a second."""
        fields = {"logprobs": True, "top_logprobs": 20, "n": 8, "search": {"events": True}}

        async def one() -> None:
            client = await self.connect(2048)
            await client.send(self.raw(self.chat(stream=True, **fields)))
            for _ in range(8):
                await client.reader.read(1)
                await asyncio.sleep(1)
            client.reset()

        slow = asyncio.gather(*(one() for _ in range(8)))
        for _ in range(5):
            await self.ask(self.raw(self.chat()))
        await slow

    async def slow_to_prepare(self) -> None:
        """Options of a search that are small to send, or large, and long to look at."""
        for own in (
            {"revisions": 20_000},
            {"revisions": 2, "critique_prompt": "word " * 800_000},
            {"revisions": 2, "revision_prompt": "word " * 800_000},
        ):
            search = {"method": "revise", "n": 2, "width": 1, "deadline": "3s", **own}
            await self.ask(self.raw(self.chat(search=search)), 120)

    async def fields(self) -> None:
        """Numbers that are none, too large, or something else, in every field."""
        own = ("n", "width", "rounds", "deadline", "token_budget", "seed", "max_tokens")
        plain = (
            *("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "stop"),
            *("max_completion_tokens", "top_logprobs", "logprobs", "stream", "frequency_penalty"),
        )
        values = (
            *(
                "NaN",
                "Infinity",
                "1e999",
                "1e308",
                "-1",
                "0",
                "0.5",
                "1e-320",
                "true",
                "null",
                '"1"',
            ),
            *("[]", "{}", "9" * 400, str(2**63), str(-(2**70)), '"\\ud800"', '["", "\\u0000"]'),
        )
        for value in values:
            for name in plain:
                await self._field(f'"{name}": {value}')
            for name in own:
                await self._field(f'"search": {{"token_budget": 300, "{name}": {value}}}')

    async def _field(self, text: str) -> None:
        body = json.dumps(self.chat(max_tokens=8, search={"token_budget": 300}))[:-1]
        await self.ask(self.raw(f"{body}, {text}}}".encode()))

    async def limits(self) -> None:
        """As much as may be asked for, and a little more."""
        for fields in (
            {"search": {"n": 512}, "max_tokens": 8},
            {"search": {"n": 512, "token_budget": 2000}},
            {"search": {"n": 512, "width": 512}, "max_tokens": 4},
            {"search": {"n": 513}},
            {"n": 128, "max_tokens": 4},
            {"n": 128, "max_tokens": 4, "stream": True, "logprobs": True, "top_logprobs": 20},
            {"n": 129},
            {"seed": 2**64 + 1, "max_tokens": 4},
            {"seed": -(2**200), "max_tokens": 4},
            {"stop": ["a" * 256] * 16, "max_tokens": 8},
            {"stop": ["\n", "\n\n", ".", " ", "1"]},
            {"stop": ["x"] * 17},
            {"stop": "\u0301"},
        ):
            client = await self.connect()
            await client.send(self.raw(self.chat(**fields), "connection: close"))
            answer = await client.until(b"never", 60)
            client.reset()
            self.statuses[answer[9:12].decode() or "hung up"] += 1

    async def pipelines(self) -> None:
        """20 requests in one write; their answers come in turn."""
        client = await self.connect()
        request = self.raw(self.chat(max_tokens=4))
        await client.send(request * 19 + self.raw(self.chat(max_tokens=4), "connection: close"))
        found = await client.until(b"never", 60)
        self.statuses.update(status.decode() for status in re.findall(rb"HTTP/1.1 (\d+)", found))
        client.reset()

    async def same_ids(self) -> None:
        """20 requests at a time that say that they are one."""
        request = self.raw(self.chat(max_tokens=8), "x-request-id: same")
        await asyncio.gather(*(self.ask(request) for _ in range(20)))

    async def many_streams(self) -> None:
        """64 streams at a time; one more is told to come later."""

        async def one(number: int) -> str:
            client = await self.begun(seed=number)
            found = await client.until(b"[DONE]", 120)
            client.reset()
            ended = found.endswith(b"data: [DONE]\n\n\r\n") or b"[DONE]" in found
            return found[9:12].decode() + ("" if ended else " cut")

        streams = [asyncio.ensure_future(one(number)) for number in range(64)]
        await asyncio.sleep(0.5)
        late = await self.ask(self.raw(self.chat()))
        found = await asyncio.gather(*streams)
        self.statuses.update(found)
        assert late in ("429", "200"), late


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    name: getattr(Attacker, name)
    for name in (
        *("leaves_in_a_round", "leaves_at_the_end", "reads_slowly", "slow_to_prepare", "fields"),
        *("limits", "pipelines", "same_ids", "many_streams"),
    )
}


# --- what is looked at ---------------------------------------------------------------------------


def probe(host: str, port: int, pipe: Connection) -> None:
    """Ask for `/health` until told to end; on a line, the longest wait since the last."""
    longest = 0.0
    while True:
        if pipe.poll():
            if pipe.recv() == "end":
                return
            pipe.send(longest)
            longest = 0.0
        began = time.perf_counter()
        http_client = http.client.HTTPConnection(host, port, timeout=120)
        with suppress(OSError, http.client.HTTPException):
            http_client.request("GET", "/health")
            http_client.getresponse().read()
        http_client.close()
        longest = max(longest, time.perf_counter() - began)
        time.sleep(0.01)


def get(attacker: Attacker, path: str) -> str:
    client = http.client.HTTPConnection(attacker.host, attacker.port, timeout=60)
    client.request("GET", path)
    text = client.getresponse().read().decode()
    client.close()
    return text


def left_over(attacker: Attacker) -> str:
    """What is still there of searches after 15 seconds; empty if all is well."""
    found = ""
    for _ in range(150):
        searches = json.loads(get(attacker, "/ready"))["searches"]
        held = re.findall(r"^beamwright_kv_bytes\{.*\} (\S+)", get(attacker, "/metrics"), re.M)
        kv = sum(map(float, held))
        found = f"{searches} searches, {kv:.0f} bytes" if searches or kv else ""
        if not found:
            break
        time.sleep(0.1)
    return found


def peak_mib(running: Running) -> int:
    with open(f"/proc/{running.process.pid}/status", encoding="ascii") as status:
        return int(re.findall(r"VmHWM:\s+(\d+)", status.read())[0]) // 1024


def rows(running: Running, names: list[str]) -> Iterator[dict[str, Any]]:
    attacker = Attacker(running)
    pipe, other = multiprocessing.Pipe()
    prober = multiprocessing.get_context("spawn").Process(
        target=probe, args=(attacker.host, attacker.port, other), daemon=True
    )
    prober.start()
    time.sleep(3)
    for name in names:
        pipe.send("longest")
        pipe.recv()
        running.longest_callback_s()
        began, attacker.statuses = time.perf_counter(), Counter()
        asyncio.run(asyncio.wait_for(ATTACKS[name](attacker), 300))  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
        pipe.send("longest")
        longest_s = pipe.recv()
        yield {
            "attack": name,
            "answers": ", ".join(f"{n} x {s}" for s, n in sorted(attacker.statuses.items())),
            "longest /health, ms": round(longest_s * 1000),
            "longest callback, ms": round(running.longest_callback_s() * 1000),
            "seconds": round(seconds, 1),
            "peak MiB": peak_mib(running),
            "left over": left_over(attacker),
        }
    pipe.send("end")
    prober.join(5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--replicas", type=int, help="of the server; one process without")
    options = parser.parse_args()
    found = []
    words = [] if options.replicas is None else ["--replicas", str(options.replicas)]
    with server(*OPTIONS, *words, watched=True) as running:
        for row in rows(running, options.only):
            say(*row.values())
            found.append(row)
        assert running.process.poll() is None
        attacker = Attacker(running)
        status = asyncio.run(attacker.ask(attacker.raw(attacker.chat())))
        assert status == "200", status
    print(table(found, COLUMNS))
    broken = [
        row["attack"] for row in found
        if row["left over"] or re.search(r"x (?:50[0-24-9]|51)", row["answers"])
    ]  # fmt: skip
    finish("serve_attacks", {"attacks": found, "broken": broken})
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()

"""Clients that do everything wrong, against a server of the bundled pair in its own process.

After each attack the server has to be alive, without a search that nobody waits for, without KV,
and no answer may have been a 5xx (but 503, "come later"). Another process asks for `/health` all
the time; its longest wait says how long nobody was heard. The event loop says itself how long one
callback kept it, from 100 ms on (asyncio's debug mode).

    python -m beamwright_lab.serve.attacks
    python -m beamwright_lab.serve.attacks --only unfinished large_chunked
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

CHAT, MIB = "/v1/chat/completions", 2**20
OPTIONS = ("--n", "8", "--width", "4", "--max-search-tokens", "20000", "--max-seconds", "20")
COLUMNS = (
    *("attack", "answers", "longest /health, ms", "longest callback, ms", "seconds", "peak MiB"),
    "left over",
)
PROBLEM = load_problems("bundled:test", limit=1).problems[0].problem

Statuses = Counter[str]


class Client:
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

    async def connect(self, buffer: int | None = None) -> Client:
        sock = socket.socket()
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
        return Client(*await asyncio.open_connection(sock=sock))

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

    async def begun(self, **fields: Any) -> Client:
        """A stream that has been asked for."""
        client = await self.connect()
        await client.send(self.raw(self.chat(stream=True, **fields)))
        return client

    # --- who leaves --------------------------------------------------------------------------

    async def leaves_queued(self) -> None:
        """40 at a time, which all leave after a moment: most of them have not begun."""
        clients = await asyncio.gather(*(self.begun(search={"n": 32}) for _ in range(40)))
        await asyncio.sleep(0.3)
        for number, client in enumerate(clients):
            client.reset() if number % 2 else client.writer.close()

    async def leaves_at_once(self) -> None:
        """60 that send a request and go, streamed and not: in prefill, or before it."""
        for number in range(60):
            client = await self.connect()
            await client.send(self.raw(self.chat(stream=number % 2 == 0, search={"n": 32})))
            await asyncio.sleep(0.005 * (number % 10))
            client.reset()

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

    async def half_closes(self) -> None:
        """Says that it has nothing more to say, and waits."""
        for number in range(6):
            client = await self.begun(seed=number)
            client.writer.write_eof()
            self.statuses[await client.status(20)] += 1
            client.reset()

    # --- who is slow -------------------------------------------------------------------------

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

    async def writes_slowly(self) -> None:
        """20 requests, a byte at a time."""

        async def one() -> None:
            client = await self.connect()
            for byte in self.raw(self.chat())[:60]:
                await client.send(bytes([byte]))
                await asyncio.sleep(0.1)
            client.reset()

        await asyncio.gather(*(one() for _ in range(20)))

    async def idles(self) -> None:
        """200 connections, half of them with half of a head."""
        clients = [await self.connect() for _ in range(200)]
        for client in clients[::2]:
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: loc")
        await asyncio.sleep(2)
        await self.ask(self.raw(self.chat()))
        for client in clients:
            client.reset()

    # --- bodies ------------------------------------------------------------------------------

    async def large(self) -> None:
        """100 MB, and it says so."""
        client = await self.connect()
        await client.send(self.head("content-length: 100000000"))
        sending = asyncio.ensure_future(self._pour(client, b"x" * MIB, 95))
        self.statuses[await client.status()] += 1
        await sending
        client.reset()

    async def large_chunked(self) -> None:
        """100 MB in chunks of unknown number."""
        client = await self.connect()
        await client.send(self.head("transfer-encoding: chunked"))
        chunk = b"%x\r\n%s\r\n" % (MIB, b"x" * MIB)
        sending = asyncio.ensure_future(self._pour(client, chunk, 95))
        self.statuses[await client.status()] += 1
        await sending
        client.reset()

    async def endless(self) -> None:
        """Chunks of one byte, for 5 seconds."""
        client = await self.connect()
        await client.send(self.head("transfer-encoding: chunked"))
        end = time.monotonic() + 5
        while time.monotonic() < end and await client.send(b"1\r\n \r\n" * 100):
            await asyncio.sleep(0)
        client.reset()

    @staticmethod
    async def _pour(client: Client, data: bytes, times: int) -> None:
        for _ in range(times):
            if not await client.send(data):
                break

    async def unfinished(self) -> None:
        """JSON that is meant to take long, 4 MB each."""
        size = 4 * MIB - 1000
        for body in (
            b"[" * 80 + b'"' + b'\\"' * (size // 2),
            b"[" * size,
            b'{"a":' * (size // 5),
            b'{"a":[' + b"[]," * (size // 3) + b"[]]}",
            b'"[' * (size // 2),
            b'{"a":' + b"9" * size + b"}",
            b'{"a":"' + b"\\ud800" * (size // 6) + b'"}',
        ):
            await self.ask(self.raw(body))

    async def long_texts(self) -> None:
        """Conversations of 4 MB: one message, 100,000 messages; 10,000 texts and token ids."""
        many = [{"role": "user", "content": "x"}] * 100_000
        for fields in (
            {"messages": [{"role": "user", "content": "word " * 800_000}]},
            {"messages": [{"role": "user", "content": "\u00e4" * 600_000}]},
            {"messages": many},
            {"messages": many[:10_000]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 90_000}]},
        ):
            await self.ask(self.raw(self.chat(**fields)))
        for prompt in (["x"] * 10_000, [5] * 1_000_000, [[5]] * 10_000, "x" * 4_000_000):
            body = {"model": self.model, "prompt": prompt}
            await self.ask(self.raw(body, path="/v1/completions"))

    async def slow_to_judge(self) -> None:
        """Below 4 MiB, and wrong a million times, or large in what is checked last."""
        size = 4 * MIB - 1000
        ones = b"[" + b"1," * (size // 2 - 200) + b"1]"
        name = self.model.encode()
        for path, fields in (
            (CHAT, b'"messages":' + ones),
            (CHAT, b'"messages":[' + b"{}," * (size // 3 - 200) + b"{}]"),
            (CHAT, b'"messages":[{"role":"user","content":' + ones + b"}]"),
            (CHAT, b'"messages":[{"role":"user","content":"x"}],"tools":' + ones),
            (CHAT, b'"messages":[{"role":"user","content":"x"}],"stop":' + ones),
            ("/v1/completions", b'"prompt":[' + b"[1]," * (size // 4 - 200) + b"[1]]"),
            ("/v1/completions", b'"prompt":[' + b"1.5," * (size // 4 - 200) + b"1.5]"),
            ("/v1/completions", b'"prompt":' + ones),
            ("/v1/responses", b'"input":' + ones),
            ("/v1/responses", b'"input":[' + b"{}," * (size // 3 - 200) + b"{}]"),
        ):
            body = b'{"model":"' + name + b'",' + fields + b"}"
            await self.ask(self.raw(body, path=path), 120)

    async def slow_to_prepare(self) -> None:
        """Options of a search that are small to send, or large, and long to look at."""
        for own in (
            {"revisions": 20_000},
            {"revisions": 2, "critique_prompt": "word " * 800_000},
            {"revisions": 2, "revision_prompt": "word " * 800_000},
        ):
            search = {"method": "revise", "n": 2, "width": 1, "deadline": "3s", **own}
            await self.ask(self.raw(self.chat(search=search)), 120)

    async def holds_bodies(self) -> None:
        """150 bodies of 4 MB, all but their last byte; then one that is whole."""
        clients = [await self.connect() for _ in range(150)]
        head = self.head(f"content-length: {4 * MIB - 1000}")
        sending = [
            asyncio.ensure_future(self._pour(client, b" " * 65_000, 64)) for client in clients
            if await client.send(head)
        ]  # fmt: skip
        await asyncio.sleep(20)
        await self.ask(self.raw(self.chat()))
        for client in clients:
            client.reset()
        for each in sending:
            each.cancel()

    async def no_text(self) -> None:
        """Bytes that are no UTF-8, texts that are none, and such as people do not type."""
        body = json.dumps(self.chat(max_tokens=8)).encode()
        for said in (b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"\x00"):
            await self.ask(self.raw(body.replace(b"Eva", said)))
        for text in (
            "\u202e\u2066\ufeff",
            "e" + "\u0301" * 100,
            "\U0001f469\u200d\U0001f680",
            "\x1b[2J",
        ):
            await self.ask(self.raw(body.replace(b"Eva", json.dumps(text)[1:-1].encode())))

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

    # --- HTTP --------------------------------------------------------------------------------

    async def heads(self) -> None:
        """Too many headers, too large ones, wrong hosts, other origins, two lengths, no HTTP."""
        body = json.dumps(self.chat(max_tokens=4)).encode()
        size = f"content-length: {len(body)}"
        many = [f"x-{number}: y" for number in range(10_000)]
        for request in (
            self.head(size, *many) + body,
            self.head(size, "x: " + "y" * MIB) + body,
            self.head(size, host="evil.example") + body,
            self.head(size, "host: evil.example") + body,
            self.head(size, "origin: http://evil.example") + body,
            self.head(size, "content-length: 5") + body,
            self.head(size, "transfer-encoding: chunked") + body,
            self.head("content-length: -1") + body,
            self.head("transfer-encoding: chunked") + b"zz\r\n",
            self.head(size, "expect: 100-continue") + body,
            self.head(size).replace(b"HTTP/1.1", b"HTTP/1.0") + body,
            b"GET /health HTTP/1.0\r\n\r\n",
            b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n",
            b"GET /%ff%00/../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET http://evil.example/ HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET " + b"/" * MIB + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"\x00" * 100_000,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            await self.ask(request, 10)

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

    async def scripts(self) -> None:
        """Tags in what is asked reach no page as tags."""
        text = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
        body = {"problem": text, "options": {"n": 4, "width": 2}}
        await self.ask(self.raw(body, path="/feed/searches"))
        client = await self.connect()
        await client.send(
            b"GET /feed/searches HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        head, _, _ = (await client.until(b"never")).lower().partition(b"\r\n\r\n")
        assert b"application/json" in head
        assert b"nosniff" in head
        client.reset()

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
        *("leaves_queued", "leaves_at_once", "leaves_in_a_round", "leaves_at_the_end"),
        *("half_closes", "reads_slowly", "writes_slowly", "idles", "large", "large_chunked"),
        *("endless", "unfinished", "long_texts", "slow_to_judge", "slow_to_prepare"),
        *("holds_bodies", "no_text", "fields", "limits", "heads"),
        *("pipelines", "same_ids", "scripts", "many_streams"),
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

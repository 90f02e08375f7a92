"""Server-sent events of a search: text that is final, rounds as reasoning, and an end in any case.

No `id:` or `retry:` field, no named event: clients of OpenAI's fail on them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from beamwright.serve.desk import Job, Round, log
from beamwright.serve.errors import ApiError, api_error
from beamwright.serve.reply import Answer, Shape, answers, search_facts, usage
from beamwright.solver.solution import Solution

QUIET_S = 10.0
"""Silence after which a comment tells a client, and what stands between, that something happens."""


class EventStream(Response):
    """Sends what an iterator yields; closes it when the client has gone.

    gone: called then, and when sending fails.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        gone: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", **(headers or {})})
        del self.headers["content-length"]
        self._events, self._gone = events, gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of one response."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and sending.exception() is None:
                return
        finally:
            leaving.cancel()
            if not sending.done() or sending.cancelled() or sending.exception() is not None:
                self._gone()
            sending.cancel()
            with suppress(BaseException):
                await sending

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in with_comments(self._events):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def with_comments(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same, with a comment where it is silent."""
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({waiting}, timeout=QUIET_S)
            if not done:
                yield b": keep-alive\n\n"
                continue
            try:
                found = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield found
    finally:
        if waiting is not None:
            waiting.cancel()


def event(data: Mapping[str, Any]) -> bytes:
    """One event; ASCII, so that no character can be cut."""
    return b"data: " + json.dumps(data, allow_nan=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Chunks:
    """The chunks of some searches, one behind the other, each as far as it is decided.

    pieces: bytes of token ids. with_usage, with_search: what was asked for beside the text.
    """

    jobs: Sequence[Job]
    shape: Shape
    fingerprint: str
    pieces: Sequence[bytes]
    with_usage: bool
    with_search: bool

    async def events(self) -> AsyncIterator[bytes]:
        """Ends with `[DONE]`, be it behind an error."""
        try:
            for index in range(self.jobs[0].ask.choices if self.shape.chat else 0):
                # A text from the start: some clients show a null.
                yield self._chunk(index, {"role": "assistant", "content": ""})
            found = []
            for number, job in enumerate(self.jobs):
                async for each in self._job(job, number * job.ask.choices):
                    yield each
                assert isinstance(job.outcome, Solution)
                found.append(answers(job, job.outcome, self.pieces))
            if self.with_usage:
                yield self._event([], usage=usage(self.jobs, found))
        except ApiError as error:
            yield event(error.body)
        except Exception as error:
            log.exception("request %s", self.jobs[0].id)
            yield event(api_error(error).body)
        finally:
            for job in self.jobs:
                job.cancel()
        yield DONE

    async def _job(self, job: Job, offset: int) -> AsyncIterator[bytes]:
        """One search, whose choices are numbered from there."""
        sent = ""
        async for _ in job.changes():
            for each in self._rounds(job, offset, thinks=not sent):
                yield each
            if new := job.text[len(sent) :]:
                sent = job.text
                yield self._chunk(offset, {"content": new})
        mine = answers(job, await job.solution(), self.pieces)
        for each in self._answers(job, mine, offset, sent):
            yield each

    def _rounds(self, job: Job, index: int, *, thinks: bool) -> Iterator[bytes]:
        """What was decided since: for people, where there is a search to tell of, and programs.

        thinks: no text has gone out. Clients that get reasoning between two pieces of a text show
        two texts, cut anywhere.
        """
        rounds, job.rounds = job.rounds, []
        thinks &= self.shape.chat and job.outcome is None and not job.ask.is_plain
        for each in rounds:
            if thinks:
                said = told(each)
                yield self._chunk(index, {"reasoning": said, "reasoning_content": said})
            if self.with_search:
                yield self._chunk(index, {}, search=vars(each))

    def _answers(self, job: Job, mine: Sequence[Answer], offset: int, sent: str) -> Iterator[bytes]:
        """What is left of the first, all of the others, and how each has ended."""
        for answer in mine:
            index = offset + answer.index
            text = answer.text if answer.index else answer.text[len(sent) :]
            if text or answer.tokens:
                yield self._event([self.shape.piece(index, {"content": text}, answer)])
            if answer.calls:
                calls = [{"index": number, **call} for number, call in enumerate(answer.calls)]
                yield self._chunk(index, {"tool_calls": calls})
            end = {**self.shape.piece(index, {}), "finish_reason": answer.finish}
            assert isinstance(job.outcome, Solution)
            facts = {} if answer.index else {"search": search_facts(job, job.outcome, mine)}
            yield self._event([end], **facts)

    def _chunk(self, index: int, delta: Mapping[str, Any], **more: Any) -> bytes:
        return self._event([self.shape.piece(index, delta)], **more)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = self.shape.head(self.jobs[0], self.fingerprint, chunk=True)
        unused = {"usage": None} if self.with_usage else {}
        return event({**head, "choices": choices, **unused, **more})


def told(found: Round) -> str:
    """A round in a line, for people."""
    best = "" if found.best is None else f", best score {found.best:.3f}"
    ended = f", {found.finished} finished" if found.finished else ""
    return (
        f"Round {found.number}: {found.candidates} candidates, {found.kept} kept{ended}{best}, "
        f"{found.tokens} tokens so far.\n"
    )

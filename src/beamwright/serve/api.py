"""Api: what OpenAI's endpoints do, over a desk."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

import beamwright
from beamwright.serve.ascii_json import AsciiJSON
from beamwright.serve.asked import SearchRequest
from beamwright.serve.body import read_body
from beamwright.serve.chunks import Chunks
from beamwright.serve.desk import Desk, Job
from beamwright.serve.errors import ApiError
from beamwright.serve.fields import ChatFields, CompletionFields, Fields, parsed
from beamwright.serve.guard import owner_of
from beamwright.serve.reply import CHAT, COMPLETION, ReplyFormat, answers, search_facts, usage
from beamwright.serve.stream import EventStream, until_gone
from beamwright.solver.solution import Solution

T = TypeVar("T")


class Api:
    """OpenAI's endpoints."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self._started_s = desk, time.time()

    @cached_property
    def fingerprint(self) -> str:
        """Of everything but the request that decides an answer."""
        settings = self.desk.solver.settings.model_dump(mode="json")
        facts = json.dumps([beamwright.__version__, settings], sort_keys=True, default=str)
        return f"bw_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    @cached_property
    def pieces(self) -> Sequence[bytes]:
        """Bytes of every token id."""
        codec = self.desk.solver.codec
        return () if codec is None else codec.token_bytes()

    # --- models ------------------------------------------------------------------------------

    def models(self) -> dict[str, Any]:
        """Every name that a search has here."""
        return {"object": "list", "data": [self._model(each) for each in self.desk.models.ids()]}

    def model(self, name: str) -> dict[str, Any]:
        """One of them."""
        self.desk.models.options(name, None)
        return self._model(name)

    def _model(self, name: str) -> dict[str, Any]:
        facts = {"object": "model", "created": int(self._started_s), "owned_by": "beamwright"}
        return {"id": name, **facts, "max_model_len": self.desk.solver.context}

    # --- answers -----------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""

        def asked(body: dict[str, Any]) -> tuple[Fields, list[SearchRequest]]:
            fields = parsed(ChatFields, body)
            return fields, [self.desk.asker.chat(fields)]

        return await self._answer(request, *await self.body(request, asked), CHAT)

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""

        def asked(body: dict[str, Any]) -> tuple[Fields, list[SearchRequest]]:
            fields = parsed(CompletionFields, body)
            return fields, self.desk.asker.completions(fields)

        return await self._answer(request, *await self.body(request, asked), COMPLETION)

    async def body(self, request: Request, taken: Callable[[dict[str, Any]], T]) -> T:
        """What is made of a request's JSON, see `read_body`. Raises ApiError."""
        return await read_body(request, self.desk.limits, taken)

    async def begin(self, request: Request, asks: Sequence[SearchRequest]) -> list[Job]:
        """All of these searches, or none."""
        jobs: list[Job] = []
        try:
            for ask in asks:
                jobs.append(await self.desk.begin(ask, owner_of(request)))
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
        return jobs

    async def _answer(
        self, request: Request, fields: Fields, asks: Sequence[SearchRequest], shape: ReplyFormat
    ) -> Response:
        shown = fields.search or {}
        jobs = await self.begin(request, asks)
        shows_tokens = any(ask.top_logprobs is not None for ask in asks)
        # Of a large vocabulary they take a while.
        pieces = self.pieces if shows_tokens or any(ask.stops for ask in asks) else ()
        if fields.stream:
            options = fields.stream_options
            stream = Chunks(
                jobs,
                shape,
                self.fingerprint,
                pieces,
                with_usage=bool(options and options.include_usage),
                with_search=bool(shown.get("events")),
            )
            return EventStream(stream.events(), lambda: cancel_all(jobs))
        solutions = await self.finish(request, jobs)
        found = [answers(*each, pieces) for each in zip(jobs, solutions, strict=True)]
        choices = [
            shape.choice(answer, number * jobs[0].ask.choices)
            for number, mine in enumerate(found)
            for answer in mine
        ]
        facts = [search_facts(*each) for each in zip(jobs, solutions, found, strict=True)]
        return AsciiJSON(
            {
                **shape.head(jobs[0], self.fingerprint, chunk=False),
                "choices": choices,
                "usage": usage(jobs, found),
                "search": facts[0] if len(facts) == 1 else facts,
            }
        )

    async def finish(self, request: Request, jobs: Sequence[Job]) -> list[Solution]:
        """Wait for all; where one fails, or the client has gone, the others are cancelled."""
        gone: asyncio.Future[None] = asyncio.ensure_future(until_gone(request.receive))
        solving: asyncio.Future[list[Solution]] = asyncio.gather(*(job.solution() for job in jobs))
        try:
            both: set[asyncio.Future[Any]] = {gone, solving}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not solving.done():
                raise ApiError(499, "the client has gone", code="cancelled")
            return solving.result()
        finally:
            cancel_all(jobs)
            gone.cancel()
            solving.cancel()
            await asyncio.gather(gone, solving, return_exceptions=True)  # or asyncio complains


def cancel_all(jobs: Sequence[Job]) -> None:
    """Those that have ended stay as they are."""
    for job in jobs:
        job.cancel()

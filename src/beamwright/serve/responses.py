"""`POST /v1/responses`, without any state: nothing is stored, and nothing can be continued."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from beamwright.serve.api import Api
from beamwright.serve.ascii_json import AsciiJSON
from beamwright.serve.asked import SearchRequest
from beamwright.serve.desk import Job
from beamwright.serve.errors import ApiError, told_error
from beamwright.serve.fields import ResponseFields, parsed
from beamwright.serve.reply import Answer, answers, search_facts, usage
from beamwright.serve.stream import EventStream, event
from beamwright.solver.solution import Solution


class Responses:
    """The endpoint over an `Api`."""

    fields = ResponseFields

    def __init__(self, api: Api) -> None:
        self._api = api

    async def respond(self, request: Request) -> Response:
        """One response, whole or as events."""
        body, ask = await self._api.body(request, self._asked)
        (job,) = await self._api.begin(request, [ask])
        if body.get("stream"):
            events = _Events(job, self._head(job, body))
            whole = partial(self._whole, job, body)
            return EventStream(events.all(whole), job.cancel)
        (solution,) = await self._api.finish(request, [job])
        (answer,) = answers(job, solution)
        return AsciiJSON(self._whole(job, body, solution, answer))

    def _asked(self, body: dict[str, Any]) -> tuple[dict[str, Any], SearchRequest]:
        for name in ("previous_response_id", "conversation"):
            if body.pop(name, None) is not None:
                raise ApiError(400, f"{name}: nothing is stored here", name, "unsupported")
        fields = parsed(ResponseFields, body)
        if fields.n not in (None, 1):
            raise ApiError(400, "n: one response only", "n")
        return body, self._api.desk.asker.response(fields)

    def _whole(
        self, job: Job, body: Mapping[str, Any], solution: Solution, answer: Answer
    ) -> dict[str, Any]:
        done = answer.finish != "length"
        counts = usage([job], [[answer]])
        return {
            **self._head(job, body),
            "status": "completed" if done else "incomplete",
            "incomplete_details": None if done else {"reason": "max_output_tokens"},
            "output": _output(job, answer),
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
            "search": search_facts(job, solution, [answer]),
        }

    def _head(self, job: Job, body: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": "resp_" + job.id.removeprefix("chatcmpl-"),
            "object": "response",
            "created_at": int(job.created_s),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": job.ask.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": body.get("temperature"),
            "text": {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "truncation": "disabled",
        }


class _Events:
    """The events of one response, numbered."""

    def __init__(self, job: Job, head: Mapping[str, Any]) -> None:
        self._job, self._head, self._number = job, head, 0
        self._item = {"id": _item_id(job), "type": "message", "role": "assistant"}
        self._place = {"item_id": _item_id(job), "output_index": 0, "content_index": 0}
        self._sent: str | None = None  # of a message that is open

    async def all(
        self, whole: Callable[[Solution, Answer], dict[str, Any]]
    ) -> AsyncIterator[bytes]:
        """From the first to the last. whole: the response that ends it."""
        job, head = self._job, self._head
        try:
            yield self._say("response.created", response=head)
            yield self._say("response.in_progress", response=head)
            async for _ in job.changes():
                job.rounds = []
                if job.text:
                    for each in self._text(job.text[len(self._sent or "") :]):
                        yield each
            solution = await job.solution()
            (answer,) = answers(job, solution)
            for index, item in enumerate(_output(job, answer)):
                if item["type"] == "message":
                    parts = self._message(index, item, answer.behind(self._sent or ""))
                else:
                    parts = self._call(index, item)
                for each in parts:
                    yield each
            found = whole(solution, answer)
            yield self._say(f"response.{found['status']}", response=found)
        except Exception as error:
            refused = told_error(error, job.id)
            code = "invalid_prompt" if refused.status == 400 else "server_error"  # of its list
            failed = {"code": code, "message": refused.message}
            response = {**head, "status": "failed", "error": failed}
            yield self._say("response.failed", response=response)
        finally:
            job.cancel()

    def _text(self, new: str) -> Iterator[bytes]:
        """More of the message, which begins with its first text."""
        yield from self._open()
        if new:
            self._sent = (self._sent or "") + new
            yield self._say("response.output_text.delta", **self._place, delta=new, logprobs=[])

    def _open(self) -> Iterator[bytes]:
        if self._sent is not None:
            return
        self._sent = ""
        begun = {**self._item, "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": []}
        yield self._say("response.output_item.added", output_index=0, item=begun)
        yield self._say("response.content_part.added", **self._place, part=part)

    def _message(self, index: int, item: Mapping[str, Any], rest: str) -> Iterator[bytes]:
        (part,) = item["content"]
        yield from self._text(rest)
        yield self._say("response.output_text.done", **self._place, text=part["text"], logprobs=[])
        yield self._say("response.content_part.done", **self._place, part=part)
        yield self._say("response.output_item.done", output_index=index, item=item)

    def _call(self, index: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        begun = {**item, "arguments": "", "status": "in_progress"}
        place, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
        kind = "response.function_call_arguments"
        yield self._say("response.output_item.added", output_index=index, item=begun)
        yield self._say(f"{kind}.delta", **place, delta=arguments)
        yield self._say(f"{kind}.done", **place, arguments=arguments, name=item["name"])
        yield self._say("response.output_item.done", output_index=index, item=item)

    def _say(self, kind: str, **data: Any) -> bytes:
        found = event({"type": kind, "sequence_number": self._number, **data})
        self._number += 1
        # Here clients do go by the event's name.
        return f"event: {kind}\n".encode() + found


def _item_id(job: Job) -> str:
    return "msg_" + job.id.removeprefix("chatcmpl-")


def _output(job: Job, answer: Answer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        content = [{"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}]
        status = "completed" if answer.finish != "length" else "incomplete"
        message = {"id": _item_id(job), "type": "message", "role": "assistant"}
        found.append({**message, "status": status, "content": content})
    for call in answer.calls:
        found.append(
            {
                "id": f"fc_{secrets.token_hex(12)}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return found

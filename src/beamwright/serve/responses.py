"""`POST /v1/responses`, without any state: nothing is stored, and nothing can be continued."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from beamwright.serve.answers import Answer, search_facts, usage
from beamwright.serve.body import Count, Fields, Objects, parsed
from beamwright.serve.chat import Message, message_text, template_call, template_message
from beamwright.serve.endpoint import Endpoint, ReplyStream, event
from beamwright.serve.errors import ApiError
from beamwright.serve.job import SearchJob
from beamwright.serve.options import RequestReader
from beamwright.tree import Conversation


class ResponseFields(Fields):
    """What a response takes."""

    input: str | Objects
    instructions: str | None = None
    max_output_tokens: Count | None = None
    reasoning: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None


class ResponsesEndpoint(Endpoint[ResponseFields]):
    """One response."""

    path, fields = "/v1/responses", ResponseFields

    def read(self, body: dict[str, Any]) -> tuple[ResponseFields, list[SearchJob]]:
        """One search."""
        for name in ("previous_response_id", "conversation"):
            if body.pop(name, None) is not None:
                raise ApiError(400, f"{name}: nothing is stored here", name, "unsupported")
        fields = parsed(ResponseFields, body)
        if fields.n not in (None, 1):
            raise ApiError(400, "n: one response only", "n")
        return fields, [response_job(self.queue.reader, fields)]

    def whole(self, fields: ResponseFields, jobs: Sequence[SearchJob]) -> dict[str, Any]:
        """The response of its only job."""
        (job,) = jobs
        (answer,) = self.answers(job)
        return self.ended(fields, job, answer)

    def stream(self, fields: ResponseFields, jobs: Sequence[SearchJob]) -> ReplyStream:
        """Its events."""
        return ResponseEvents(self, fields, jobs)

    def ended(self, fields: ResponseFields, job: SearchJob, answer: Answer) -> dict[str, Any]:
        """The response with its answer."""
        done, counts = answer.finish != "length", usage([job], [[answer]])
        return {
            **self.head(fields, job),
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
            "search": search_facts(job, [answer]),
        }

    def head(self, fields: ResponseFields, job: SearchJob) -> dict[str, Any]:
        """The response as it begins."""
        return {
            "id": f"resp_{job.number}",
            "object": "response",
            "created_at": int(job.created_s),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": (fields.model_extra or {}).get("metadata") or {},
            "model": job.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": fields.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_p": fields.top_p,
            "truncation": "disabled",
        }


class ResponseEvents(ReplyStream):
    """The events of one response, numbered."""

    def __init__(
        self, endpoint: ResponsesEndpoint, fields: ResponseFields, jobs: Sequence[SearchJob]
    ) -> None:
        super().__init__(jobs)
        (self._job,) = jobs
        self._endpoint, self._fields, self._number = endpoint, fields, 0
        self._head = endpoint.head(fields, self._job)
        self._item_id = f"msg_{self._job.number}"
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._sent: str | None = None  # of a message that is open

    def failed(self, error: ApiError) -> bytes:
        """The response's own failure."""
        code = "invalid_prompt" if error.status == 400 else "server_error"  # of its list
        failed = {"code": code, "message": error.message}
        response = {**self._head, "status": "failed", "error": failed}
        return self._say("response.failed", response=response)

    async def parts(self) -> AsyncIterator[bytes]:
        """All events."""
        job = self._job
        yield self._say("response.created", response=self._head)
        yield self._say("response.in_progress", response=self._head)
        async for _ in job.changes():
            job.rounds = []
            if job.text:
                for part in self._text(job.text[len(self._sent or "") :]):
                    yield part
        await job.solution()
        (answer,) = self._endpoint.answers(job)
        for index, item in enumerate(_output(job, answer)):
            is_text = item["type"] == "message"
            for part in self._message(index, item, answer) if is_text else self._call(index, item):
                yield part
        response = self._endpoint.ended(self._fields, job, answer)
        yield self._say(f"response.{response['status']}", response=response)

    def _text(self, new: str) -> Iterator[bytes]:
        """More of the message, which begins with its first text."""
        if self._sent is None:
            self._sent = ""
            item = {"id": self._item_id, "type": "message", "role": "assistant"}
            begun = {**item, "status": "in_progress", "content": []}
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._say("response.output_item.added", output_index=0, item=begun)
            yield self._say("response.content_part.added", **self._place, part=part)
        if new:
            self._sent += new
            yield self._say("response.output_text.delta", **self._place, delta=new, logprobs=[])

    def _message(self, index: int, item: Mapping[str, Any], answer: Answer) -> Iterator[bytes]:
        (part,) = item["content"]
        yield from self._text(answer.behind(self._sent or ""))
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
        said = event({"type": kind, "sequence_number": self._number, **data})
        self._number += 1
        # Here clients do go by the event's name.
        return f"event: {kind}\n".encode() + said


def _output(job: SearchJob, answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        content = [{"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}]
        status = "completed" if answer.finish != "length" else "incomplete"
        message = {"id": f"msg_{job.number}", "type": "message", "role": "assistant"}
        items.append({**message, "status": status, "content": content})
    for call in answer.calls:
        items.append(
            {
                "id": f"fc_{secrets.token_hex(12)}",
                "type": "function_call",
                "call_id": call["id"],
                **call["function"],
                "status": "completed",
            }
        )
    return items


# --- what is asked ---------------------------------------------------------------------------


def response_job(reader: RequestReader, fields: ResponseFields) -> SearchJob:
    """The search of a conversation that nobody remembers. Raises ApiError 400."""
    messages = _messages(fields.input)
    if fields.instructions:
        messages.insert(0, {"role": "system", "content": fields.instructions})
    if (fields.text or {}).get("format", {"type": "text"}) != {"type": "text"}:
        raise ApiError(400, "text.format: only text is supported", "text.format")
    effort = (fields.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise ApiError(400, "reasoning.effort: is a name", "reasoning.effort")
    if effort is not None:
        fields = fields.model_copy(update={"reasoning_effort": effort})
    # A function's fields stand beside its type here.
    nested = [
        {"type": tool.get("type"), "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in fields.tools or ()
    ]
    problem = Conversation(tuple(messages), reader.tools(nested, fields.tool_choice))
    limit = fields.max_output_tokens or fields.max_tokens
    return reader.job(fields, problem, limit, param="input")


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = []
    for number, item in enumerate(given):
        message = _message(item, f"input[{number}]")
        if message is not None:
            messages.append(message)
    if not messages:
        raise ApiError(400, "input: is empty", "input")
    return messages


def _message(item: Mapping[str, Any], param: str) -> dict[str, Any] | None:
    """An item as chat templates take it; None for one that is ignored."""
    match item.get("type", "message"):
        case "message":
            return template_message(_checked(item, param), param)
        case "function_call":
            call = template_call({"id": item.get("call_id"), "function": dict(item)}, param)
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            text = item.get("output")
            if not isinstance(text, str):  # parts of one
                output = _checked({"role": "tool", "content": text or []}, param)
                text = message_text(output, f"{param}.output")
            return {"role": "tool", "content": text, "tool_call_id": item.get("call_id")}
        case "reasoning":
            return None
        case kind:
            raise ApiError(400, f"{param}: {kind!s:.40} is not supported", param, "unsupported")


def _checked(item: Mapping[str, Any], param: str) -> Message:
    try:
        return Message.model_validate(dict(item))
    except ValueError:
        raise ApiError(400, f"{param}: no message with a role and content", param) from None

"""Endpoints whose replies have no `choices`: `POST /v1/responses` and `POST /v1/score`.

`/v1/responses` takes and returns text, and stores no state between requests. `/v1/score` returns
the verifier's scores of steps that the client sends. A score request is handled like a search: it
has the same queue and limits, counts as one request, and is listed on the live page. The verifier
scores its steps between decode iterations of the running searches.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from beamwright.serve.answers import (
    choices_of,
    finish_reason_of,
    split_reply,
    unsent_text,
    usage_fields,
)
from beamwright.serve.body import ITEMS, ApiError, Count, Fields, parse_fields
from beamwright.serve.chat import Message, make_conversation
from beamwright.serve.endpoint import Endpoint, format_event
from beamwright.serve.job import SearchJob, text_of

_MISSING = {
    "item_reference": ": the server stores no items, so send the item itself (store: false)",
    **dict.fromkeys(
        ("function_call", "function_call_output"), ": use /v1/chat/completions for tools"
    ),
}


def _as_messages(given: Any) -> Any:
    """Convert input items to messages, and put each thought into the message that follows it.

    Raises:
        ApiError: 400 for an item of an unsupported type.
    """
    if not isinstance(given, list):
        return [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages, thought = list[Any](), ""
    for number, item in enumerate(given):
        kind = (item.get("type") or "message") if isinstance(item, dict) else "message"
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary")
            parts = parts if isinstance(parts, list) else []
            texts = (part.get("text") for part in parts if isinstance(part, dict))
            thought = "\n".join(text for text in texts if isinstance(text, str))
            continue
        if kind != "message":
            where, why = f"input[{number}]", _MISSING.get(str(kind), "")
            raise ApiError(
                400,
                f"{where}: items of type {kind!s:.40} are not supported{why}",
                where,
                "unsupported",
            )
        is_reply = isinstance(item, dict) and item.get("role") == "assistant"
        messages.append({**item, "reasoning": thought} if is_reply and thought else item)
        thought = ""
    return messages


class ResponseFields(Fields):
    """Fields of a request to `/v1/responses`. input: a text, or a list of messages."""

    input: Annotated[list[Message], ITEMS, BeforeValidator(_as_messages)] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Count | None = None


class ResponsesEndpoint(Endpoint):
    """`POST /v1/responses`: one reply to a text or to messages, whole or as a stream of events.

    Events have numbers and names, because clients of this endpoint read both.
    """

    path, takes = "/v1/responses", ResponseFields
    fields: ResponseFields
    _number, _sent = 0, ""

    def make_jobs(self, body: dict[str, Any]) -> list[SearchJob]:
        """Turn the body into one search."""
        fields = self.fields = parse_fields(ResponseFields, body)
        if fields.n not in (None, 1):
            raise ApiError(400, "n: must be 1", "n")
        self.streamed, self._place = bool(fields.stream), dict[str, Any]()
        problem = make_conversation(fields.input, "input", fields.chat_template_kwargs)
        if fields.instructions:
            said = {"role": "system", "content": fields.instructions}
            problem = replace(problem, messages=(said, *problem.messages))
        limit = fields.max_output_tokens or fields.max_tokens
        return [self.queue.reader.make_job(fields, problem, limit, "input")]

    def build_reply(self) -> dict[str, Any]:
        """Build the response object, with the answer of the finished job."""
        (job,) = self.jobs
        (answer,) = choices_of(job)
        done, counts = finish_reason_of(answer) == "stop", usage_fields([job])
        status, reply = (
            "completed" if done else "incomplete",
            split_reply(job.reply_nodes(answer)[-1]),
        )
        shown = reply.thought and self.fields.shows_thoughts
        thoughts = [self._thought_item(reply.thought)] if shown else []
        return {
            **self._head(status),
            "incomplete_details": None if done else {"reason": "max_output_tokens"},
            "output": [*thoughts, self._item(status, reply.said)],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
            "search": self.facts(job),
        }

    async def stream_events(self) -> AsyncIterator[bytes]:
        """Stream the events of a response: its creation, the thought, one message, its end.

        The message has one content part. The thought is sent whole, before the message's text.
        """
        (job,) = self.jobs
        yield self._say("response.created", response=self._head("in_progress"))
        async for _ in job.changes():
            if job.told.said:
                for each in self._told(*job.told):
                    yield each
        await job.solution()
        response = self.build_reply()
        *thoughts, item = response["output"]
        (part,) = item["content"]
        thought = "".join(each["content"][0]["text"] for each in thoughts)
        for each in self._told(thought, part["text"]):
            yield each
        place, index = self._place, self._place["output_index"]
        yield self._say("response.output_text.done", **place, text=part["text"], logprobs=[])
        yield self._say("response.content_part.done", **place, part=part)
        yield self._say("response.output_item.done", output_index=index, item=item)
        yield self._say(f"response.{response['status']}", response=response)

    def _told(self, thought: str, text: str) -> Iterator[bytes]:
        """Yield events with the part of `text` that was not sent yet.

        Events with the whole `thought` precede those with the first text.
        """
        if not self._place:
            yield from self._begun(thought)
        if new := unsent_text(text, self._sent):
            yield self._say("response.output_text.delta", **self._place, delta=new, logprobs=[])
        self._sent = text

    def _begun(self, thought: str) -> Iterator[bytes]:
        """Yield the events that precede the message's text: the thought, and the new message.

        Sets `_place`, the indices of the message, which every later event repeats.
        """
        index = 0
        if thought and self.fields.shows_thoughts:
            done = self._thought_item(thought)
            where = {"item_id": done["id"], "output_index": index, "content_index": 0}
            begun = {**done, "content": [], "status": "in_progress"}
            yield self._say("response.output_item.added", output_index=index, item=begun)
            yield self._say("response.reasoning_text.delta", **where, delta=thought)
            yield self._say("response.reasoning_text.done", **where, text=thought)
            yield self._say("response.output_item.done", output_index=index, item=done)
            index = 1
        item = self._item("in_progress")
        self._place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        yield self._say("response.output_item.added", output_index=index, item=item)
        yield self._say("response.content_part.added", **self._place, part=_part(""))

    def error_event(self, error: ApiError) -> bytes:
        """Build the event of a failed response."""
        # OpenAI lists both codes for this endpoint.
        code = "invalid_prompt" if error.status == 400 else "server_error"
        failed = {**self._head("failed"), "error": {"code": code, "message": error.message}}
        return self._say("response.failed", response=failed)

    def _head(self, status: str) -> dict[str, Any]:
        (job,) = self.jobs
        return {
            "id": f"resp_{job.number}",
            "object": "response",
            "created_at": int(job.created_s),
            "model": job.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "store": False,
        }

    def _item(self, status: str, *texts: str) -> dict[str, Any]:
        item = {"id": f"msg_{self.jobs[0].number}", "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": [_part(text) for text in texts]}

    def _thought_item(self, text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        item = {"id": f"rs_{self.jobs[0].number}", "type": "reasoning", "summary": []}
        return {**item, "content": content, "status": "completed"}

    def _say(self, kind: str, **data: Any) -> bytes:
        said = format_event({"type": kind, "sequence_number": self._number, **data})
        self._number += 1
        return f"event: {kind}\n".encode() + said


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


# --- scores ----------------------------------------------------------------------------------

_MOST_STEPS = 1024
_Text = Annotated[str, Field(strict=True)]
_Path = Annotated[list[_Text], Field(max_length=_MOST_STEPS, fail_fast=True)]


class ScoreFields(BaseModel):
    """Fields of a score request: a problem or messages, and the steps of one or several paths.

    A path is a solution as a list of steps, of which the last one ends the solution.
    delimiter: text that ends each step except the last of a path. The server appends this text to
        steps that do not end with it. Default: the server's own delimiter.
    """

    model_config = ConfigDict(extra="allow")
    model: Annotated[str, Field(strict=True, min_length=1)] | None = None
    problem: _Text | None = None
    messages: Annotated[list[Message], ITEMS] | None = Field(None, min_length=1)
    steps: _Path | Annotated[list[_Path], ITEMS]
    delimiter: _Text | None = None
    aggregate: Literal["last", "min", "prod", "mean"] | None = None


class ScoreEndpoint(Endpoint):
    """`POST /v1/score`: the verifier's score of each given step and of each path of steps."""

    path, takes = "/v1/score", ScoreFields

    def make_jobs(self, body: dict[str, Any]) -> list[SearchJob]:
        """Turn the body into one job that scores all paths."""
        fields, limits = parse_fields(ScoreFields, body), self.queue.limits
        model = fields.model or self.queue.reader.name
        self.queue.reader.options(model)
        match fields.problem, fields.messages:
            case str() as problem, None:
                asked: Any = problem
            case None, list() as messages:
                asked = make_conversation(messages, "messages")
            case _:
                raise ApiError(400, "problem: send either problem or messages", "problem")
        paths: list[list[str]] = [p for p in fields.steps if isinstance(p, list)]
        paths = paths or [[step for step in fields.steps if isinstance(step, str)]]
        if len(paths) > limits.n:
            raise ApiError(400, f"steps: {len(paths)} paths exceed the limit {limits.n}", "steps")
        about = {"problem": text_of(asked), "model": model, "method": "score", "n": len(paths)}
        options: dict[str, Any] = fields.model_dump(include={"aggregate", "delimiter"})
        param = "problem" if fields.messages is None else "messages"
        about |= {"width": 1, "seed": 0}
        options["deadline"] = limits.seconds
        return [SearchJob(model, asked, options, about, len(paths), param=param, paths=paths)]

    def build_reply(self) -> dict[str, Any]:
        """Build the reply: the scores of each path and of its steps, in vLLM's format.

        The reply's warnings say why the scores may be unreliable.
        """
        (job,) = self.jobs
        solution = job.finished_solution
        read, written = solution.tokens.verifier_prefilled, solution.tokens.verifier_generated
        return {
            "id": job.id,
            "object": "list",
            "created": int(job.created_s),
            "model": job.model,
            "data": [
                {"index": index, "object": "score", "score": path.score, "scores": path.step_scores}
                for index, path in enumerate(solution.candidates)
            ],
            "warnings": list(solution.warnings),
            "usage": {
                "prompt_tokens": read,
                "completion_tokens": written,
                "total_tokens": read + written,
            },
        }

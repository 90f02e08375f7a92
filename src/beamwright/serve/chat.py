"""`POST /v1/chat/completions`: a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from beamwright.serve.answers import Answer, AnswerToken
from beamwright.serve.body import (
    ITEMS,
    MOST_TOP_LOGPROBS,
    Count,
    Fields,
    Objects,
    Whole,
    parsed,
)
from beamwright.serve.choices import LEAST_LOGPROB, ChoicesEndpoint
from beamwright.serve.errors import ApiError
from beamwright.serve.job import SearchJob
from beamwright.serve.options import RequestReader
from beamwright.tree import Conversation


class Part(BaseModel):
    """A piece of a message's content. Only text is understood."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = Field(None, strict=True)


class Message(BaseModel):
    """One message of a conversation; what was thought before is accepted, and ignored."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], ITEMS] | None = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None


class ChatFields(Fields):
    """What a chat takes."""

    messages: Annotated[list[Message], ITEMS] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = Field(None, strict=True)
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None


class ChatEndpoint(ChoicesEndpoint[ChatFields]):
    """A conversation's next message."""

    path, fields = "/v1/chat/completions", ChatFields
    kind, chunk, prefix, talks = "chat.completion", "chat.completion.chunk", "chatcmpl-", True

    def read(self, body: dict[str, Any]) -> tuple[ChatFields, list[SearchJob]]:
        """One search."""
        fields = parsed(ChatFields, body)
        return fields, [chat_job(self.queue.reader, fields)]

    def content(self, answer: Answer) -> dict[str, Any]:
        """A message."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text if answer.text or not answer.calls else None,
            "refusal": None,
        }
        if answer.calls:
            message["tool_calls"] = list(answer.calls)
        return {"message": message}

    def delta(self, said: dict[str, Any]) -> dict[str, Any]:
        """A part of one."""
        return {"delta": said}

    def logprobs(self, tokens: Sequence[AnswerToken] | None) -> dict[str, Any] | None:
        """Each token with its bytes."""
        if tokens is None:
            return None

        def shown(data: bytes, logprob: float) -> dict[str, Any]:
            text = data.decode("utf-8", "replace")
            return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}

        content = [
            {**shown(token.data, token.logprob), "top_logprobs": [shown(*top) for top in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def chat_job(reader: RequestReader, fields: ChatFields) -> SearchJob:
    """The search of a conversation. Raises ApiError 400 for what is not understood."""
    tools = reader.tools(fields.tools, fields.tool_choice)
    messages = tuple(
        template_message(message, f"messages[{number}]")
        for number, message in enumerate(fields.messages)
    )
    if fields.top_logprobs and not fields.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs", "top_logprobs")
    top = (fields.top_logprobs or 0) if fields.logprobs else None
    limit = fields.max_completion_tokens or fields.max_tokens
    return reader.job(fields, Conversation(messages, tools), limit, top)


def template_message(message: Message, param: str) -> dict[str, Any]:
    """A message as chat templates take it. param: where it stands. Raises ApiError."""
    if message.role == "function":
        raise ApiError(400, f"{param}.role: function is no longer supported", f"{param}.role")
    shown: dict[str, Any] = {"role": message.role, "content": message_text(message, param)}
    if message.tool_calls:
        calls = [template_call(call, f"{param}.tool_calls") for call in message.tool_calls]
        shown["tool_calls"] = calls
    elif message.content is None:
        raise ApiError(400, f"{param}.content: is missing", f"{param}.content")
    for name in ("tool_call_id", "name"):
        if getattr(message, name) is not None:
            shown[name] = getattr(message, name)
    return shown


def message_text(message: Message, param: str) -> str:
    """What it says; raises ApiError for a part that is no text."""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for number, part in enumerate(message.content or ()):
        where = f"{param}.content[{number}]"
        if part.type not in ("text", "input_text", "output_text"):
            raise ApiError(400, f"{where}: {part.type} is not supported", where, "unsupported")
        if part.text is None:
            raise ApiError(400, f"{where}.text: is missing", f"{where}.text")
        texts.append(part.text)
    return "\n".join(texts)


def template_call(call: Mapping[str, Any], param: str) -> dict[str, Any]:
    """A call of a tool with its arguments as an object: chat templates write it out again."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{param}: no function with a name", param)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{param}: arguments are no JSON", param) from None
    shown = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": shown}

"""What a request says, as the solver takes it: messages, prompts, items of `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from beamwright.conversation import RawPrompt
from beamwright.serve.errors import ApiError
from beamwright.serve.fields import Message


def message_of(message: Message, param: str) -> dict[str, Any]:
    """A turn as chat templates take it. param: where it stands. Raises ApiError."""
    if message.role == "function":
        raise ApiError(400, f"{param}.role: function is no longer supported", f"{param}.role")
    found: dict[str, Any] = {"role": message.role, "content": _text(message, param)}
    if message.tool_calls:
        found["tool_calls"] = [_call(each, f"{param}.tool_calls") for each in message.tool_calls]
    elif message.content is None:
        raise ApiError(400, f"{param}.content: is missing", f"{param}.content")
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    return found


def _text(message: Message, param: str) -> str:
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


def _call(call: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Arguments as an object: chat templates write it out again."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{param}: no function with a name", param)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{param}: arguments are no JSON", param) from None
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[RawPrompt]:
    """Every prompt of a completion."""
    if isinstance(prompt, str):
        return [RawPrompt(prompt)]
    ids = tuple(each for each in prompt if isinstance(each, int))
    if ids:
        return [RawPrompt(ids)]
    texts = [each for each in prompt if not isinstance(each, int)]
    return [RawPrompt(each if isinstance(each, str) else tuple(each)) for each in texts]


def messages_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of `/v1/responses` as messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found = []
    for number, item in enumerate(given):
        param = f"input[{number}]"
        match item.get("type", "message"):
            case "message":
                found.append(message_of(_checked(item, param), param))
            case "function_call":
                call = {"id": item.get("call_id"), "function": dict(item)}
                calls = [_call(call, param)]
                found.append({"role": "assistant", "content": "", "tool_calls": calls})
            case "function_call_output":
                found.append(
                    {
                        "role": "tool",
                        "content": _output(item.get("output"), param),
                        "tool_call_id": item.get("call_id"),
                    }
                )
            case "reasoning":
                continue
            case kind:
                raise ApiError(400, f"{param}: {kind!s:.40} is not supported", param, "unsupported")
    if not found:
        raise ApiError(400, "input: is empty", "input")
    return found


def _output(output: Any, param: str) -> str:
    """What a function has returned: a text, or parts of one."""
    if isinstance(output, str):
        return output
    return _text(_checked({"role": "tool", "content": output or []}, param), f"{param}.output")


def _checked(item: Mapping[str, Any], param: str) -> Message:
    try:
        return Message.model_validate(dict(item))
    except ValueError:
        raise ApiError(400, f"{param}: no message with a role and content", param) from None


def nested_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """`/v1/responses` has a function's fields beside its type."""
    if tools is None:
        return None
    return [
        {"type": each.get("type"), "function": {k: v for k, v in each.items() if k != "type"}}
        for each in tools
    ]

"""What requests may say. Fields that would change an answer are honoured or refused, none ignored.

Pydantic checks types; `NEUTRAL` has the fields that are let through as long as they change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from beamwright.serve.errors import ApiError

F = TypeVar("F", bound=BaseModel)

MOST_STOPS, MOST_CHOICES, MOST_TOP_LOGPROBS, MOST_PROMPTS = 16, 128, 20, 32
_MOST_ITEMS = 10_000  # messages, parts, tools

# A body has room for a million mistakes; the first one is what is told.
_ITEMS = Field(max_length=_MOST_ITEMS, fail_fast=True)
_PROMPTS = Field(max_length=MOST_PROMPTS, fail_fast=True)
_STOPS = Field(max_length=MOST_STOPS, fail_fast=True)


def _anything(value: Any) -> bool:
    del value
    return True


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: (
        value is None
        or any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in values
        )
    )


def _no_bias(value: Any) -> bool:
    return not value or (isinstance(value, dict) and not any(value.values()))


def _nothing(value: Any) -> bool:
    return not value


NEUTRAL: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("user", "metadata", "safety_identifier", "prompt_cache_key"),
                *("prompt_cache_retention", "prompt_cache_options"),
                *("service_tier", "mm_processor_kwargs"),
            ),
            _anything,
        ),
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), _one_of(0)),
        "repetition_penalty": _one_of(1),
        "verbosity": _one_of("medium"),
        "parallel_tool_calls": _one_of(True),
        "logit_bias": _no_bias,
        "store": _one_of(False),
        "modalities": _one_of(["text"]),
        "response_format": _one_of({"type": "text"}),
        "prediction": _one_of(),
        "audio": _one_of(),
        "web_search_options": _one_of(),
        "moderation": _one_of(),
        "function_call": _one_of("none"),
        "functions": _nothing,
        "suffix": _one_of(""),
        "echo": _one_of(False),
        "best_of": _one_of(1),
        "include": _one_of([]),
        "truncation": _one_of("disabled"),
        "background": _one_of(False),
    }
)
"""By name: whether a value changes nothing."""


def _integral(value: Any) -> Any:
    # 1.0 is an int in JSON; true is not.
    if isinstance(value, bool):
        raise ValueError("a boolean is no number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_integral), Field(strict=True)]
Number = Annotated[float, BeforeValidator(_integral), Field(strict=True)]
Objects = Annotated[list[dict[str, Any]], _ITEMS]
Ids = Annotated[list[Whole], Field(fail_fast=True)]  # a body holds so many values


class Part(BaseModel):
    """A piece of a message's content. Only text is understood."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = Field(None, strict=True)


class Message(BaseModel):
    """A turn of a conversation; what was thought before is accepted, and ignored."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], _ITEMS] | None = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None


class StreamOptions(BaseModel):
    """What a stream has beside its text."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None


class Fields(BaseModel):
    """What all endpoints take."""

    model_config = ConfigDict(extra="allow")
    model: str = Field(strict=True, min_length=1)
    stream: bool | None = Field(None, strict=True)
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Whole | None = None
    stop: str | Annotated[list[str], _STOPS] | None = None
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    reasoning_effort: str | None = None
    search: dict[str, Any] | None = None


class ChatFields(Fields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], _ITEMS] = Field(min_length=1)
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = Field(None, strict=True)
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None


class CompletionFields(Fields):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[str], _PROMPTS] | Ids | Annotated[list[Ids], _PROMPTS]
    logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    return_token_ids: bool | None = Field(None, strict=True)
    include_stop_str_in_output: bool | None = Field(None, strict=True)


class ResponseFields(Fields):
    """`POST /v1/responses`, without any state."""

    input: str | Objects
    instructions: str | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    reasoning: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None


def parsed(kind: type[F], body: Mapping[str, Any]) -> F:
    """The fields of a request.

    Raises:
        ApiError: 400, with `param`, for a bad value and for a field that would be ignored.
    """
    try:
        found = kind.model_validate(dict(body))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # Of a union's branches, the one that fits but for its length.
        first = next((each for each in errors if each["type"] == "too_long"), errors[0])
        param = _dotted(first["loc"])
        missing = first["type"] == "missing"
        said = "is missing" if missing else first["msg"].removeprefix("Value error, ")
        code = "missing_required_parameter" if missing else "invalid_value"
        raise ApiError(400, f"{param}: {said}", param, code) from None
    extra = found.model_extra or {}
    for name, value in extra.items():
        if name == "functions" and extra.get("function_call") == "none":
            continue  # they are there, and none is called
        neutral = NEUTRAL.get(name)
        if neutral is None:
            raise ApiError(400, f"{name}: no such parameter here", name, "unknown_parameter")
        if not neutral(value):
            raise ApiError(
                400, f"{name}: not supported, and it would change the answer", name, "unsupported"
            )
    return found


def _dotted(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content`; the branches of a union are nobody's business."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "dict"):
            text += f".{part}" if text else part
    return text

"""The body of a request: bytes in, checked fields out, or one line that says what is wrong.

Bodies are bounded before they are parsed, and parsed off the event loop. Fields that would change
an answer are honoured or refused, none ignored: pydantic checks types, `NEUTRAL` has the fields
that are let through as long as they change nothing. What goes wrong is an `ApiError`, in OpenAI's
shape.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from beamwright.errors import (
    BeamwrightError,
    Cancelled,
    CapacityError,
    DeviceMemoryError,
    InputError,
    ProblemTooLongError,
    UnavailableError,
    message_of,
)
from beamwright.io import nonfinite_as_null

T = TypeVar("T")
F = TypeVar("F", bound=BaseModel)

log = logging.getLogger("beamwright.serve")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Some clients ask again whatever they are told at 5xx, 408, 409 and 429.
_STATUSES: tuple[tuple[type[BeamwrightError], int, str | None], ...] = (
    (ProblemTooLongError, 400, "context_length_exceeded"),
    (InputError, 400, None),
    (Cancelled, 499, "cancelled"),
    (UnavailableError, 503, "unavailable"),
    (CapacityError, 422, "out_of_memory"),
    (DeviceMemoryError, 422, "out_of_memory"),
    (BeamwrightError, 422, "search_failed"),
)


class ApiError(Exception):
    """A refusal. param: the field that is wrong; code: for programs.

    retry_after_s: when it may be asked again; None: it would only fail again, and clients are told
    not to (`x-should-retry`).
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI has it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, kind)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> AsciiJSON:
        """As a client gets it, with what clients go by before they ask again."""
        headers: Mapping[str, str] = {"x-should-retry": "false"}
        if self.retry_after_s is not None:
            headers = {"retry-after": str(self.retry_after_s)}
        return AsciiJSON(self.body, status_code=self.status, headers=headers)


class AsciiJSON(JSONResponse):
    """JSON whose characters are escaped: what clients send back to them may be no UTF-8, halves of
    characters, say, which Starlette's cannot encode. Blanks follow colons, as in OpenAI's: clients
    look for `"code": "context_length_exceeded"` in it. Numbers that JSON lacks are null."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(nonfinite_as_null(content), allow_nan=False).encode("ascii")


def api_error(error: BaseException, param: str | None = None) -> ApiError:
    """What a search that failed is to who asked for it. A bug's own words stay in the log."""
    if isinstance(error, ApiError):
        return error
    said = str(error)
    if isinstance(error, ProblemTooLongError):  # in OpenAI's words: clients go by them
        said = (
            f"This model's maximum context length is {error.context} tokens. However, your "
            f"messages resulted in {error.num_tokens} tokens. (context_length_exceeded)"
        )
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            retry_after_s = 30 if status == 503 else None
            return ApiError(status, said, param if status == 400 else None, code, retry_after_s)
    return ApiError(500, "internal error", code="internal_error")


@dataclass(frozen=True)
class ServerLimits:
    """What one request, and all of them together, may take.

    requests: that are searched or wait, requests_per_key: of these, one API key's; one more is told
    to come later (429). n: candidates of one search. tokens: generated for one search. seconds: for
    one search, waiting included; then the best so far is the answer. body_bytes, depth, values: of
    a request's JSON; bodies_bytes: of all bodies that are here, beyond 64 KiB of each. drain_s:
    after SIGTERM, until what still runs is ended with the best so far.
    """

    requests: int = 64
    requests_per_key: int = 64
    n: int = 512
    tokens: int = 1_000_000
    seconds: float = 600.0
    body_bytes: int = 4 * 2**20
    bodies_bytes: int = 64 * 2**20
    depth: int = 64
    values: int = 2**18
    drain_s: float = 30.0

    @property
    def too_large(self) -> ApiError:
        """What is said of a body that nobody reads to its end."""
        return ApiError(413, f"the body is larger than {self.body_bytes:,} bytes")


_DEFAULT = ServerLimits()


# --- JSON ------------------------------------------------------------------------------------

BODY_S = 60.0
"""Seconds that a request's body may take to come."""

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""Strings as a whole, one that never ends, too; possessive, so that none is read twice."""

_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


async def read_body(
    request: Request, limits: ServerLimits, read: Callable[[dict[str, Any]], T]
) -> T:
    """What `read` makes of a request's JSON, in a thread: megabytes take a while to look at.

    Raises:
        ApiError: as `read_json` and `read`; 408 for a body that does not come, 499 where nobody
            is left.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    break
    except ClientDisconnect:
        raise ApiError(499, "the client has gone", code="cancelled") from None
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {BODY_S:.0f} s") from None
    return await asyncio.to_thread(lambda: read(read_json(bytes(body), limits)))


def read_json(body: bytes, limits: ServerLimits) -> dict[str, Any]:
    """Raises ApiError 400 for what is no JSON object, nested too deeply, or of too many values, 413
    for too many bytes."""
    if len(body) > limits.body_bytes:
        raise limits.too_large
    try:
        value = strict_json(body.decode("utf-8"), limits)
    except ValueError as error:
        said = message_of(error)
        said = said if said.startswith(("has", "is")) else f"is no JSON: {said}"
        raise ApiError(400, f"the body {said}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body is JSON, but not an object")
    return value


def strict_json(text: str, limits: ServerLimits = _DEFAULT) -> Any:
    """The value of a JSON text within bounds.

    Raises:
        ValueError: for what is nested too deeply, or of too many values, and for numbers that JSON
            lacks; JSONDecodeError, which is one, for what is no JSON.
    """
    bare = _STRINGS.sub(b"", text.encode("utf-8", "surrogatepass"))
    # The parser lets nobody else compute while it makes objects of them.
    if sum(map(bare.count, (b",", b"[", b"{"))) > limits.values:
        raise ValueError(f"has more than {limits.values:,} values")
    # How deep brackets go: the parser's own recursion never sees more.
    brackets = bare.translate(None, _OTHERS)
    if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > limits.depth:
        raise ValueError(f"is nested more than {limits.depth} deep")
    return json.loads(text, parse_constant=_refused, parse_float=_finite)


def read_arguments(given: Any = None) -> Any:
    """The arguments of a call: the value of their JSON; the text itself where it is no JSON, as of
    a call that was cut off, or a text in JSON. Raises ValueError for other faults."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    try:
        value = strict_json(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        return given
    return {} if value is None else given if isinstance(value, str) else value


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


# --- fields ----------------------------------------------------------------------------------

MOST_STOPS, MOST_CHOICES = 16, 128

# A body has room for a million mistakes; the first one is what is told.
ITEMS = Field(max_length=10_000, fail_fast=True)  # of messages, or their parts
_STOPS = Field(max_length=MOST_STOPS, fail_fast=True)

NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("user", "metadata", "safety_identifier", "service_tier")),
        "reasoning_format": ("auto", "deepseek"),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention")),
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
        **dict.fromkeys(("store", "echo", "logprobs", "background"), (False,)),
        **dict.fromkeys(("ignore_eos", "use_beam_search", "continue_final_message"), (False,)),
        **dict.fromkeys(("return_token_ids", "include_stop_str_in_output"), (False,)),
        **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
        **dict.fromkeys(("top_logprobs", "min_tokens", "mirostat", "priority"), (0,)),
        **dict.fromkeys(("best_of", "repetition_penalty", "repeat_penalty"), (1,)),
        **dict.fromkeys(("length_penalty", "typical_p"), (1,)),
        **dict.fromkeys(("previous_response_id", "conversation", "prediction", "audio"), ()),
        "verbosity": ("medium",),
        "logit_bias": ({},),
        **dict.fromkeys(("tools", "functions", "stop_token_ids", "bad_words"), ([],)),
        "include": [  # of what no answer here has
            *("reasoning.encrypted_content", "file_search_call.results"),
            *("web_search_call.results", "web_search_call.action.sources"),
            *("message.input_image.image_url", "computer_call_output.output.image_url"),
            "code_interpreter_call.outputs",
        ],
        **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
        "parallel_tool_calls": (True,),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "text": {"format": ({"type": "text"},), "verbosity": ("medium",)},
        "suffix": ("",),
        "truncation": ("disabled", "auto"),  # what is too long is refused
    }
)
"""By name: the values that change nothing, beside null; None: all of them. A list: whatever is a
list of these; a mapping: objects whose members are as it says."""


def _is_neutral(value: Any, neutral: Any) -> bool:
    if neutral is None or value is None:
        return True
    if isinstance(neutral, Mapping):
        return isinstance(value, dict) and all(
            _is_neutral(part, neutral.get(name, ())) for name, part in value.items()
        )
    if isinstance(neutral, list):
        return isinstance(value, list) and all(part in neutral for part in value)
    return value in neutral


def _integral(value: Any) -> Any:
    # 1.0 is an int in JSON; true is not.
    if isinstance(value, bool):
        raise ValueError("a boolean is no number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Behind their bounds, or these are in no schema.
INTEGRAL = BeforeValidator(_integral)
Whole = Annotated[int, Field(strict=True), INTEGRAL]
Count = Annotated[int, Field(strict=True, ge=1), INTEGRAL]
Bound = Annotated[int, Field(strict=True, ge=-1), INTEGRAL]  # -1: none


class StreamOptions(BaseModel):
    """What a stream has beside its text."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def _without_nulls(given: Any) -> Any:
    return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given


class Reasoning(BaseModel):
    """How much is thought, in OpenRouter's words and OpenAI's. exclude: it is not shown."""

    model_config = ConfigDict(extra="forbid")
    effort: Effort | None = None
    max_tokens: Bound | None = None
    enabled: bool | None = Field(None, strict=True)
    exclude: bool | None = Field(None, strict=True)
    summary: Literal["auto", "concise", "detailed"] | None = None  # the whole thought is shown


class Fields(BaseModel):
    """What all endpoints take. Budgets: of thoughts, in vLLM's words and llama-server's; below 0
    there is none."""

    model_config = ConfigDict(extra="allow")
    model: str = Field(strict=True, min_length=1)
    stream: bool | None = Field(None, strict=True)
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2), INTEGRAL] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1), INTEGRAL] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1), INTEGRAL] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1), INTEGRAL] | None = None
    seed: Whole | None = None
    stop: str | Annotated[list[str], _STOPS] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MOST_CHOICES), INTEGRAL] | None = None
    max_tokens: Count | None = None
    reasoning_effort: Effort | None = None
    reasoning: Annotated[Reasoning | None, BeforeValidator(_without_nulls)] = None
    include_reasoning: bool | None = Field(None, strict=True)
    thinking_token_budget: Bound | None = None
    thinking_budget_tokens: Bound | None = None
    reasoning_budget_tokens: Bound | None = None
    reasoning_budget: Bound | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    search: dict[str, Any] | None = None

    @property
    def effort(self) -> Effort | None:
        """How much is searched and thought, in a word."""
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)

    @property
    def shows_thoughts(self) -> bool:
        """False where nobody wants to read them."""
        excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is not False and not excluded


def parsed(kind: type[F], body: Mapping[str, Any]) -> F:
    """The fields of a request.

    Raises:
        ApiError: 400, with `param`, for a bad value and for a field that would be ignored.
    """
    try:
        fields = kind.model_validate(dict(body))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # Of a union's branches, the one that fits but for its length.
        first = next((fault for fault in errors if fault["type"] == "too_long"), errors[0])
        param, missing = _dotted(first["loc"]), first["type"] == "missing"
        said = "is missing" if missing else first["msg"].removeprefix("Value error, ")
        code = "missing_required_parameter" if missing else "invalid_value"
        raise ApiError(400, f"{param}: {said}", param, code) from None
    for name, value in (fields.model_extra or {}).items():
        if value is not None and name not in NEUTRAL:
            raise ApiError(400, f"{name}: no such parameter here", name, "unknown_parameter")
        idle = name == "logit_bias" and isinstance(value, dict) and not any(value.values())
        if not (idle or _is_neutral(value, NEUTRAL.get(name))):
            said = f"{name}: not supported, and it would change the answer"
            raise ApiError(400, said, name, "unsupported")
    return fields


def _dotted(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content`; the branches of a union are nobody's business."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "dict"):
            text += f".{part}" if text else part
    return text

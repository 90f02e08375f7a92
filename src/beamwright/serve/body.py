"""Request bodies: parse and validate JSON, or refuse it with a one-line error.

A body's size is checked before parsing, and a thread does the parsing. Pydantic checks types. A
field that would change an answer is either honoured or refused, never ignored. `NEUTRAL` lists
unsupported fields, with the values that change nothing and are accepted. Every error is an
`ApiError` in OpenAI's JSON format.
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
from beamwright.io import describe_fault, nonfinite_as_null

T = TypeVar("T")
F = TypeVar("F", bound=BaseModel)

log = logging.getLogger("beamwright.serve")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# HTTP status and error code by error class. Failed searches have status 422, not 500, because some
# clients always retry 5xx, 408, 409 and 429, even if a header forbids retries.
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
    """An HTTP error response in OpenAI's format.

    status: the HTTP status code.
    param: the name of the wrong field; code: a short error code for programs; both may be None.
    retry_after_s: seconds after which the client may retry. None if a retry would fail again; the
        response then has the header `x-should-retry: false`.
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
        """The JSON body in OpenAI's error format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, kind)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> AsciiJSON:
        """The HTTP response, with the headers by which clients decide whether to retry."""
        headers: Mapping[str, str] = {"x-should-retry": "false"}
        if self.retry_after_s is not None:
            headers = {"retry-after": str(self.retry_after_s)}
        return AsciiJSON(self.body, status_code=self.status, headers=headers)


class AsciiJSON(JSONResponse):
    """A JSON response in ASCII, with all other characters escaped.

    A reply may quote text that is not valid Unicode, such as a lone surrogate, which Starlette's
    JSON response cannot encode. A blank follows each colon, as in OpenAI's replies, because clients
    search the body for `"code": "context_length_exceeded"`. NaN and infinities become null.
    """

    def render(self, content: Any) -> bytes:
        """Encode the body."""
        return json.dumps(nonfinite_as_null(content), allow_nan=False).encode("ascii")


def api_error(error: BaseException, param: str | None = None) -> ApiError:
    """Return the error response for a failed search. param: the field that holds the problem.

    The message of an unexpected exception is not shown to clients, only "internal error".
    """
    if isinstance(error, ApiError):
        return error
    said = str(error)
    if isinstance(error, ProblemTooLongError):  # OpenAI's own words, which clients search for
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
    """Limits of one request and of all requests together.

    requests: searches that run or wait at once; a further request is refused with 429.
    requests_per_key: number of these searches that one API key may have, also enforced with 429.
    n: candidates of one search. tokens: tokens generated for one search.
    seconds: seconds of one search, waiting included; it then ends with its best candidate so far.
    body_bytes: bytes of one request's body.
    bodies_bytes: bytes of all bodies in memory, not counting the first 64 KiB of each.
    depth, values: nesting depth and number of values of a request's JSON.
    drain_s: grace period after SIGTERM, in seconds, after which running searches end with their
        best candidates so far.
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
        """The error for a body that exceeds `body_bytes`; the rest of the body is not read."""
        return ApiError(413, f"the body is larger than {self.body_bytes:,} bytes")


_DEFAULT = ServerLimits()


# --- JSON ------------------------------------------------------------------------------------

# Timeout for receiving a request's body, in seconds.
BODY_S = 60.0

# Matches a whole JSON string, or an unterminated one up to the end of the text. Possessive
# quantifiers rule out backtracking, so that hostile input takes linear time.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)

_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


async def read_body(
    request: Request, limits: ServerLimits, read: Callable[[dict[str, Any]], T]
) -> T:
    """Read a request's body as JSON, and return the result of `read` on the JSON object.

    Parsing and `read` run in a thread, since megabytes of JSON would block the event loop.

    Raises:
        ApiError: as `read_json` and `read` do; 408 if the body does not arrive within `BODY_S`, 499
            if the client disconnects.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    break
    except ClientDisconnect:
        raise ApiError(499, "the client disconnected", code="cancelled") from None
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {BODY_S:.0f} s") from None
    return await asyncio.to_thread(lambda: read(read_json(bytes(body), limits)))


def read_json(body: bytes, limits: ServerLimits) -> dict[str, Any]:
    """Parse a body into a JSON object. Raises ApiError 413 for too many bytes, and 400 if the body
    is not JSON, not an object, nested too deeply or has too many values."""
    if len(body) > limits.body_bytes:
        raise limits.too_large
    try:
        value = parse_strict_json(body.decode("utf-8"), limits)
    except ValueError as error:
        said = message_of(error)
        said = said if said.startswith(("has", "is")) else f"cannot be read as JSON: {said}"
        raise ApiError(400, f"the body {said}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return value


def parse_strict_json(text: str, limits: ServerLimits = _DEFAULT) -> Any:
    """Parse a JSON text within the limits `depth` and `values`.

    Raises:
        ValueError: if the text is nested too deeply, has too many values, or has a number that JSON
            does not allow (NaN, infinities, and numbers too large for a float). JSONDecodeError, a
            subclass, if the text is not JSON.
    """
    bare = _STRINGS.sub(b"", text.encode("utf-8", "surrogatepass"))
    # Count the values before parsing: the parser holds Python's global lock while it creates
    # values, so a body with millions of values would stall all other threads.
    if sum(map(bare.count, (b",", b"[", b"{"))) > limits.values:
        raise ValueError(f"has more than {limits.values:,} values")
    # Check the depth before parsing: the parser recurses, so deep nesting would exceed its limit.
    brackets = bare.translate(None, _OTHERS)
    if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > limits.depth:
        raise ValueError(f"is nested more than {limits.depth} levels deep")
    return json.loads(text, parse_constant=_refused, parse_float=_finite)


def read_arguments(given: Any = None) -> Any:
    """Return the arguments of a tool call, parsed from JSON; {} if there are none.

    A text that is not JSON is returned unchanged, such as the arguments of a truncated call. A JSON
    text whose value is a string is returned unchanged as well.

    Raises:
        ValueError: as `parse_strict_json` does, except for a text that is not JSON.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    try:
        value = parse_strict_json(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        return given
    return {} if value is None else given if isinstance(value, str) else value


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


# --- fields ----------------------------------------------------------------------------------

MOST_STOPS, MOST_CHOICES = 16, 128

# A body can hold a million wrong values, so validation stops at the first one (`fail_fast`).
ITEMS = Field(max_length=10_000, fail_fast=True)  # limit on messages, and on a message's parts
_STOPS = Field(max_length=MOST_STOPS, fail_fast=True)

# Accepted values of unsupported fields, which change nothing. The rule of a field is a tuple (one
# of these values), None (any value), a list (a list with only these items) or a mapping (an object
# whose members follow the rules in it). Null is always accepted.
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
        "include": [  # parts of a reply that this server never produces
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
        "truncation": ("disabled", "auto"),  # a prompt that is too long is refused, never truncated
    }
)


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
    # In JSON, 1.0 counts as an integer, and true does not, although it is an int in Python.
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Place `INTEGRAL` after the bounds in `Annotated`: otherwise the JSON schema omits the bounds.
INTEGRAL = BeforeValidator(_integral)
Whole = Annotated[int, Field(strict=True), INTEGRAL]
Count = Annotated[int, Field(strict=True, ge=1), INTEGRAL]
Bound = Annotated[int, Field(strict=True, ge=-1), INTEGRAL]  # -1: no bound


class StreamOptions(BaseModel):
    """Options of a stream. include_usage: true to send a chunk with the token counts at the end."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def _without_nulls(given: Any) -> Any:
    return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given


class Reasoning(BaseModel):
    """Limits on the model's thoughts, in the fields of OpenRouter and OpenAI. exclude: true to
    leave the thought out of the reply."""

    model_config = ConfigDict(extra="forbid")
    effort: Effort | None = None
    max_tokens: Bound | None = None
    enabled: bool | None = Field(None, strict=True)
    exclude: bool | None = Field(None, strict=True)
    # `summary` is accepted and ignored: the reply always has the whole thought.
    summary: Literal["auto", "concise", "detailed"] | None = None


class Fields(BaseModel):
    """Fields that every endpoint with a search accepts.

    Four fields limit the tokens of a thought, under the names that vLLM and llama-server use. A
    negative number means no limit.
    """

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
        """The requested reasoning effort, which sets n, width and the limit of a thought."""
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)

    @property
    def shows_thoughts(self) -> bool:
        """True unless the request asks for a reply without thoughts."""
        excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is not False and not excluded


def parse_fields(kind: type[F], body: Mapping[str, Any]) -> F:
    """Validate a request's body as the model `kind`.

    Raises:
        ApiError: 400, with `param`, for a bad value, an unknown field, or an unsupported field
            whose value would change the answer.
    """
    try:
        fields = kind.model_validate(dict(body))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # A field of a union type has an error per branch. If one branch only finds the value too
        # long, its error is the helpful one.
        first = next((fault for fault in errors if fault["type"] == "too_long"), errors[0])
        param, missing = _dotted(first["loc"]), first["type"] == "missing"
        said = "the field is missing" if missing else describe_fault(first)
        code = "missing_required_parameter" if missing else "invalid_value"
        raise ApiError(400, f"{param}: {said}", param, code) from None
    for name, value in (fields.model_extra or {}).items():
        if value is not None and name not in NEUTRAL:
            raise ApiError(400, f"{name}: unknown parameter", name, "unknown_parameter")
        idle = name == "logit_bias" and isinstance(value, dict) and not any(value.values())
        if not (idle or _is_neutral(value, NEUTRAL.get(name))):
            said = f"{name}: this parameter is not supported and would change the answer; remove it"
            raise ApiError(400, said, name, "unsupported")
    return fields


def _dotted(loc: tuple[int | str, ...]) -> str:
    """Return a field's place as text, such as `messages[0].content`.

    Names of union branches, which pydantic adds to `loc`, are left out.
    """
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "dict"):
            text += f".{part}" if text else part
    return text

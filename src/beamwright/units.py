"""Parse settings that users write as text, such as `7GiB`, `30s` or `1/8`; their pydantic types."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, WrapValidator

from beamwright.errors import InputError, message_of

GIB = 2**30

_SIZES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SIZES[f"{_letter}ib"] = 1024**_power
    _SIZES[f"{_letter}b"] = 1000**_power
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}

_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def _quantity(
    text: str | float, units: Mapping[str, int], what: str, such_as: str, least: float = 0.0
) -> float:
    """Parse a positive number with a unit, and convert it to the base unit.

    units: the factor of each unit, by lower-case name.
    what, such_as: the kind of quantity and an example, for errors.

    Raises:
        InputError: if the text is not a quantity, is not positive, or is below `least`.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        number: float = text
    else:
        match = _QUANTITY.match(str(text))
        if match is None or match[2].lower() not in units:
            raise InputError(f"{text!r} is not a {what}: write {such_as}")
        number = float(match[1]) * units[match[2].lower()]
    if not (0 < number < 2**1023 and number >= least):
        raise InputError(f"a {what} must be positive, not {text!r}")
    return number


def parse_size(text: str | int) -> int:
    """Return the bytes of a size such as `7GiB`, `512MiB`, `4GB` or a plain number of bytes.

    Raises:
        InputError: if the text is not a size, or is not positive.
    """
    # `7G` is refused, because some users mean GiB and others GB.
    return int(_quantity(text, _SIZES, "size", "7GiB, 512MiB or 4GB", least=1))


def parse_duration(text: str | float) -> float:
    """Return the seconds of a duration such as `30s`, `2m`, `1h` or a plain number of seconds.

    Raises:
        InputError: if the text is not a duration, or is not positive.
    """
    return float(_quantity(text, _SECONDS, "duration", "30s, 2m or 1h"))


def _parse_rate(text: str | int) -> int:
    return parse_size(text.removesuffix("/s") if isinstance(text, str) else text)


def parse_split(text: str | float) -> str | float:
    """Parse `--split`: "auto", or the generator's share of KV memory, between 0 and 1.

    Raises:
        InputError: if the text is not one of these.
    """
    # `roofline` and `offload` are FlashTTS's two ways to split, which `auto` replaced
    if text in ("auto", "roofline", "offload"):
        return "auto"
    with suppress(TypeError, ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise InputError(f"{text!r} is not a split: write auto or a share such as 0.7")


def parse_select(text: str | float) -> int | float:
    """Parse `--select`: a number of tokens (int), or a share of the visible tokens (float).

    A share is written `1/8` or `0.125`; `all` is the share 1.0.

    Raises:
        InputError: if the text is none of these, or is not positive.
    """
    if text == "all":
        return 1.0
    top, _, bottom = str(text).partition("/")
    with suppress(ValueError, ZeroDivisionError):  # a text that is not a number, such as "True"
        value = float(top) / float(bottom or 1)
        if 0 < value < 1 or (isinstance(text, float) and value == 1):
            return value
        if value >= 1 and value.is_integer():
            return int(value)
    raise InputError(
        f"{text!r} is not a selection: write all, a number such as 2048, or a share such as 1/8"
    )


MOST_CLOSING = 200  # maximum bytes of `--close-message`
MOST_DRAFTS = 15  # maximum of `--drafts`: an iteration decodes up to 16 tokens of a row


def _word_or_tokens(
    takes: Any, words: Sequence[str], said: str, least: int = 1, most: float = math.inf
) -> BeforeValidator:
    """Return a pydantic validator for a setting that is one of `words` or a number of tokens.

    takes: the setting's type, for its JSON schema.
    said: the end of the error message for any other value.
    least, most: limits of the number; 0 becomes "off".
    """

    def parse(text: str | int) -> str | int:
        if text in words:
            return text
        if not isinstance(text, bool) and str(text).isdigit() and least <= int(text) <= most:
            return int(text) or "off"
        raise InputError(f"{text!r} {said}")

    return _parsed(parse, takes)


def parse_close_message(text: str) -> str:
    """Check the length of `--close-message`, the text that ends a thought which is cut off.

    The length is limited in bytes, because each byte may become a token.

    Raises:
        InputError: if it is too long.
    """
    if (size := len(str(text).encode(errors="replace"))) > MOST_CLOSING:
        raise InputError(f"the closing message has {size} bytes, the limit is {MOST_CLOSING}")
    return text


def _parsed(parse: Callable[[Any], Any], takes: Any) -> BeforeValidator:
    """Wrap a parser as a pydantic validator: None stays, and InputError becomes ValueError.

    takes: the type of the input, for the JSON schema.
    """

    def validate(value: Any) -> Any:
        try:
            return None if value is None else parse(value)
        except InputError as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(validate, json_schema_input_type=takes)


# Arguments that Beamwright or `transformers` sets itself when it renders a chat template.
RESERVED_ARGS = frozenset((
    "self", "messages", "conversation", "conversations", "tools", "chat_template", "tokenize",
    "add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
))  # fmt: skip


def parse_template_args(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Parse `--template-args`, a mapping or JSON text, and check the names.

    Raises:
        InputError: if `given` is neither, if a value is not valid JSON, or if a name is reserved or
            is not an identifier.
    """
    try:
        plain = json.loads(given) if isinstance(given, str) else dict(given)
        written = json.dumps(plain, allow_nan=False, ensure_ascii=False)
        written.encode()  # fails for lone surrogates
        args = json.loads(written)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{given!r:.80} is not a JSON object ({message_of(error):.80})") from error
    if not isinstance(args, dict):
        raise InputError(
            f"{given!r:.80} is not a JSON object such as " + '{"enable_thinking": false}'
        )
    for name in args:
        if name in RESERVED_ARGS or not name.isidentifier():
            why = "is reserved" if name in RESERVED_ARGS else "is not an identifier"
            raise InputError(f"{name!r:.80} {why}: it cannot be an argument of a chat template")
    return args


def _parse_time(given: Any) -> Any:
    try:
        return given if given is None else datetime.fromisoformat(str(given)).isoformat()
    except ValueError:
        line = "is not a time: write 2026-11-28 or 2026-11-28T14:30"
        raise InputError(f"{given!r:.80} {line}") from None


def _path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class ModelName(str):
    """The value of `--model`, without the login that its URL may contain.

    login: user and password for its server. They are kept out of the text, so no message or file
        shows them.
    """

    login = ""


# The login ends at the last @, because a password may contain one. The text after `//` is not a
# login if it looks like a host followed by a slash.
_LOGIN = re.compile(r"(openai:\w+://)(?![\w.-]+(?::\d+)?/)([^#]*)@(.*)", re.DOTALL)


def _without_login(value: Any, validate: Callable[[Any], str]) -> ModelName:
    if isinstance(value, ModelName):
        return value
    text = validate(value)
    match = _LOGIN.match(text)
    name = ModelName(match[1] + match[3] if match else text)
    name.login = match[2] if match else ""
    if name.startswith("openai:") and "?" in name.partition("#")[0]:
        raise ValueError(
            "the URL of a server must not have a query; give an API key by --model-key FILE"
        )
    return name


def _numbers(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


def _one_or_several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


# A text that may be a path; a `Path` is accepted, too.
Text = Annotated[str, _parsed(_path_as_text, str | os.PathLike[str])]
ModelText = Annotated[Text, WrapValidator(_without_login)]
TextOrNone = Annotated[str | None, _parsed(_path_as_text, str | os.PathLike[str] | None)]
# One text or several. A single text is never split at commas, because it may contain any character.
_StopString = Annotated[str, Field(min_length=1, max_length=256)]
StopStrings = Annotated[tuple[_StopString, ...], _parsed(_one_or_several, Sequence[str] | str)]
_Limit = Annotated[int, Field(ge=1)]
StepLimits = Annotated[tuple[_Limit, ...] | None, _parsed(_numbers, Sequence[int] | str | None)]
Size = Annotated[int | None, _parsed(parse_size, int | str | None)]
# Bytes per second, such as `16GB/s`.
Rate = Annotated[int | None, _parsed(_parse_rate, int | str | None)]
# The generator's share of the KV memory, or "auto".
Split = Annotated[Literal["auto"] | float, _parsed(parse_split, Literal["auto"] | float)]
# A number of tokens, or a share of the visible tokens; 1.0 is all of them.
Select = Annotated[int | float, _parsed(parse_select, int | float | str)]
# `--drafts`: limit on the tokens drafted for a row in one pass.
_Drafts = Literal["auto", "off"] | int
_NO_DRAFTS = f"is not a draft limit: write auto, off or 1 to {MOST_DRAFTS} tokens"
Drafts = Annotated[_Drafts, _word_or_tokens(_Drafts, ("auto", "off"), _NO_DRAFTS, most=MOST_DRAFTS)]
# `--thinking`: whether a model thinks, or a limit on the tokens of its thought.
_Thinking = Literal["auto", "on", "off"] | int
_NO_THINKING = "is not a thinking mode: write auto, on, off or a number of tokens"
Thinking = Annotated[
    _Thinking, _word_or_tokens(_Thinking, ("auto", "on", "off"), _NO_THINKING, least=0)
]
CloseMessage = Annotated[str, _parsed(parse_close_message, str)]
# `--thought-steps`: how thoughts are cut into steps.
_Cut = Literal["auto", "whole", "paragraphs", "sentences", "markers"]
_CUTS = get_args(_Cut)
_ThoughtSteps = _Cut | int
_NO_STEPS = f"is not a way to cut thoughts: write {', '.join(_CUTS)} or a number of tokens"
ThoughtSteps = Annotated[_ThoughtSteps, _word_or_tokens(_ThoughtSteps, _CUTS, _NO_STEPS)]
# Seconds, from a text such as `30s`, `2m` or `1h`.
Duration = Annotated[float | None, _parsed(parse_duration, float | str | None)]
Time = Annotated[str | None, _parsed(_parse_time, str | None)]
# Arguments of the chat template, by name.
TemplateArgs = Annotated[dict[str, Any], _parsed(parse_template_args, Mapping[str, Any] | str)]

"""Renders chat templates with limits on time and memory, because they are untrusted programs.

Templates can use the names that `transformers` defines for them. Jinja's sandbox protects
everything except memory and time, which this module limits. The time of day that a template sees is
an argument, so rendering never reads the clock.
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from beamwright.errors import InputError, error_line, message_of

RENDER_S = 5.0
MOST_CHARACTERS = 1 << 24
_MOST_SOURCE = 1 << 18  # characters of a template; published ones have about ten thousand
_DEEPEST = 200  # deepest nesting; Python compiles about as many nested brackets or blocks
_LARGEST = 100_000
_LONGEST_REPEATED = 100
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)|\{[^{}]*:[^{}]*(\d{4}|\{)")

_WORD = re.compile(r"\w+")
_PHRASE_WORDS = 8  # words of a phrase in `shows_text`
_MOST_PHRASES = 64
CLOCK = "strftime_now"  # the function that templates call for the time
_NO_TIME = "1970-01-01"  # the time that a template sees if `now` is not given

# A function that renders a conversation to text.
#
# It takes `messages` and further template arguments by name. `now` is the time that the template
# sees, in ISO 8601.
WriteChat = Callable[..., str]


class _Generation(Extension):
    """The tag `generation`, which `transformers` defines around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (as its base has it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, *, ensure_ascii: bool = False, **form: Any) -> str:
    """Convert to JSON without escaping for HTML, which Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.globals |= {
    "raise_exception": _refuse,
    # A function, not the class `dict`, with whose methods a template could change its arguments.
    "dict": lambda *args, **named: dict(*args, **named),  # noqa: PLW0108
}


# --- bounds ----------------------------------------------------------------------------------


def check_template(template: Any, where: str) -> None:
    """Check that a template is valid Jinja and has no single operation that may take too long.

    Python cannot interrupt one operation, such as a power of large numbers.

    template: a template, or several by name; other types are ignored.

    Raises:
        InputError: for a power, a product without a small literal, a large number or format width,
            a template that is too long or nested too deeply, or invalid Jinja.
    """
    way = "; correct it, or give --chat-template FILE for --model"
    for text in _texts(template):
        try:
            violation = _violation_of(text)
            if violation is None:
                _compile(text)
        except TemplateSyntaxError as error:
            line = (text.splitlines() or [""])[min(error.lineno, len(text.splitlines())) - 1]
            violation = f"line {error.lineno} is not valid Jinja: {line.strip():.60}"
        except (RecursionError, MemoryError):
            violation = "the template is nested too deeply"
        except (ValueError, OverflowError) as error:  # a number with too many digits
            violation = error_line(error)
        if violation is not None:
            raise InputError(f"{where}: chat template: {violation}{way}")


def argument_names(template: str | dict[str, str] | None) -> frozenset[str]:
    """Return the names of the arguments that a template, or any of several, may read."""
    read = (meta.find_undeclared_variables(_ENVIRONMENT.parse(t)) for t in _texts(template))
    return frozenset[str]().union(*read)


def _texts(template: Any) -> Iterator[str]:
    several = template.values() if isinstance(template, dict) else [template]
    return (text for text in several if isinstance(text, str))


def _violation_of(text: str) -> str | None:
    """Return a message about the first operation that is not allowed; None if there is none."""
    if len(text) > _MOST_SOURCE:
        return f"the template has {len(text):,} characters, more than {_MOST_SOURCE:,}"
    parsed = _ENVIRONMENT.parse(text)
    waiting: list[tuple[nodes.Node, int]] = [(parsed, 0)]
    while waiting:
        node, depth = waiting.pop()
        if depth > _DEEPEST:
            return "the template is nested too deeply"
        if (violation := _node_violation(node)) is not None:
            return violation
        waiting += [(child, depth + 1) for child in node.iter_child_nodes()]
    return None


def _node_violation(node: nodes.Node) -> str | None:
    if isinstance(node, nodes.Pow):
        return "powers (**) are not allowed"
    if isinstance(node, nodes.Mul) and not (_is_small(node.left) or _is_small(node.right)):
        return "one side of a product must be a small literal"
    if isinstance(node, nodes.Const) and type(node.value) is int and node.value > _LARGEST:
        return f"{node.value:,} is larger than {_LARGEST:,}"
    if _WIDTH.search(_pattern(node)):
        return "a format width must be a literal of at most 999"
    return None


def _is_small(node: nodes.Node) -> bool:
    value = getattr(node, "value", None)  # only a literal has one
    if isinstance(value, str):
        return len(value) <= _LONGEST_REPEATED
    return isinstance(value, int | float) and abs(value) <= _LARGEST


def _pattern(node: nodes.Node) -> str:
    """Return the literal format string of a `%` or `format` expression, else an empty string."""
    literal = None
    if isinstance(node, nodes.Mod):
        literal = node.left
    elif getattr(node, "name", getattr(node, "attr", "")) in ("format", "format_map"):
        literal = getattr(node, "node", None)  # the input of a filter, or the object of a method
    return str(literal.value) if isinstance(literal, nodes.Const) else ""


def shows_text(text: str, rendered: str) -> bool:
    """Return whether a rendered prompt contains a message's text.

    At least half of the text's phrases must be in the prompt. Only words are compared, because
    templates strip blanks and may escape or leave out a word.
    """
    shown = _words(rendered.replace("\\n", "\n"))
    if (whole := _words(text)) in shown:
        return True
    words = whole.split()
    phrases = [" ".join(words[i : i + _PHRASE_WORDS]) for i in range(0, len(words), _PHRASE_WORDS)]
    phrases = phrases[:: 1 + len(phrases) // _MOST_PHRASES]
    return sum(phrase in shown for phrase in phrases) * 2 >= len(phrases)


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.casefold()))


# --- arguments of tool calls -----------------------------------------------------------------


def parse_tool_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which the arguments of every tool call are a dictionary.

    Some templates loop over the items of this dictionary. Arguments that are a string without valid
    JSON, such as those of a truncated call, are wrapped in a dictionary.

    Raises:
        InputError: for arguments that are valid JSON but not a dictionary.
    """
    turns = deepcopy([*map(dict, messages)])
    for i, turn in enumerate(turns):
        for j, call in enumerate(turn.get("tool_calls") or ()):
            function = call.get("function", call)
            given = function.get("arguments", {})
            if not isinstance(given, Mapping):
                function["arguments"] = {"arguments": given}
                with suppress(ValueError, RecursionError):
                    _ = json.loads(given) if isinstance(given, str) else given
                    place = f"messages[{i}].tool_calls[{j}].function.arguments"
                    raise InputError(
                        f"{place}: the chat template needs an object, not {given!r:.60}"
                    )
    return turns


# --- rendering -------------------------------------------------------------------------------


def template_writer(template: str | dict[str, str], special_tokens: Mapping[str, str]) -> WriteChat:
    """Return a function that renders a template.

    Of several templates it uses `tool_use` if tools are given, else `default`.
    special_tokens: texts of special tokens by role, such as `bos_token`.
    """

    def write(messages: Any, *, now: str | None = None, **names: Any) -> str:
        usual = template if isinstance(template, str) else template.get("default")
        if isinstance(template, dict) and names.get("tools"):
            usual = template.get("tool_use", usual)
        if usual is None:
            _refuse(f"{', '.join(template)}: none is the default; choose one with --chat-template")
        clock = {CLOCK: datetime.fromisoformat(now or _NO_TIME).strftime}
        nothing = {"tools": None, "documents": None}
        given = {"messages": messages, **nothing, **clock, **special_tokens, **names}
        return _compile(usual).render(given)

    return write


@lru_cache(maxsize=64)
def _compile(text: str) -> Template:
    return _ENVIRONMENT.from_string(text)


def render_with_limits(make: Callable[[], str], where: str) -> str:
    """Call `make`, which renders a template, in a thread that is stopped after a timeout.

    where: the beginning of an error message.

    Raises:
        InputError: if `make` fails, takes more than `RENDER_S` seconds, or renders more than
            `MOST_CHARACTERS` characters.
    """
    texts: list[str] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            texts.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name="chat template")
    thread.start()
    thread.join(RENDER_S)
    if thread.is_alive():
        assert thread.ident is not None
        stop, raised = ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(stop, raised)
        raise InputError(f"{where}chat template: rendering took more than {RENDER_S:.0f} s")
    if errors:
        line = message_of(errors[0]) or type(errors[0]).__name__
        raise InputError(f"{where}chat template: {line}") from errors[0]
    (text,) = texts
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"{where}chat template: its text of {len(text):,} characters is too long")
    return text

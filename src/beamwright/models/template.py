"""Chat templates are programs that a model folder brings along: they are given bounds.

`transformers` renders them in Jinja's sandbox, which keeps them from everything but memory and
time; that of the bundled pair is rendered here, without waiting for `transformers`.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from beamwright.errors import InputError, line_of, said_by

RENDER_S = 5.0
MOST_CHARACTERS = 1 << 24
_MOST_SOURCE = 1 << 18  # characters; published ones have some ten thousand
_DEEPEST = 200  # Python takes no more brackets or blocks than about this
_LARGEST = 100_000
_LONGEST_REPEATED = 100
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)|\{[^{}]*:[^{}]*(\d{4}|\{)")

WriteChat = Callable[..., str]
"""A conversation as text: `messages`, and what else the template may ask for by name."""


class _Generation(Extension):
    """`transformers` has this tag, around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (as its base has it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# --- bounds ----------------------------------------------------------------------------------


def check_template(template: Any, where: str) -> None:
    """Refuse what is computed in one go, which nothing can interrupt, and what is no program.

    template: of a tokenizer; several go by name.

    Raises:
        InputError: for a power, a product without a small literal, a large number or width, and a
            text that is too long or nested too deeply.
    """
    for text in template.values() if isinstance(template, dict) else [template]:
        if not isinstance(text, str):
            continue
        try:
            wrong = _refused(text)
        except TemplateSyntaxError:
            continue  # said by whoever renders it
        except (RecursionError, MemoryError):
            wrong = "nested too deeply"
        except (ValueError, OverflowError) as error:  # a number too long to be read
            wrong = line_of(error)
        if wrong is not None:
            raise InputError(f"{where}: chat template: {wrong}")


def names_read(template: str | dict[str, str] | None) -> frozenset[str]:
    """Names that a template, or one of several, may read of what it is given."""
    texts = template.values() if isinstance(template, dict) else [template or ""]
    return frozenset[str]().union(*(meta.find_undeclared_variables(_parse(t)) for t in texts))


def _parse(text: str) -> nodes.Template:
    return Environment(extensions=[_Generation, loopcontrols]).parse(text)


def _refused(text: str) -> str | None:
    """What a template must not do; None for what it may."""
    if len(text) > _MOST_SOURCE:
        return f"{len(text):,} characters, more than {_MOST_SOURCE:,}"
    parsed = _parse(text)
    waiting: list[tuple[nodes.Node, int]] = [(parsed, 0)]
    while waiting:
        node, depth = waiting.pop()
        if depth > _DEEPEST:
            return "nested too deeply"
        if (wrong := _refused_node(node)) is not None:
            return wrong
        waiting += [(child, depth + 1) for child in node.iter_child_nodes()]
    return None


def _refused_node(node: nodes.Node) -> str | None:
    if isinstance(node, nodes.Pow):
        return "powers (**) are not allowed"
    if isinstance(node, nodes.Mul) and not (_is_small(node.left) or _is_small(node.right)):
        return "a product needs a number or a short text, written out, as one side"
    if isinstance(node, nodes.Const) and type(node.value) is int and node.value > _LARGEST:
        return f"{node.value:,} is larger than {_LARGEST:,}"
    if _WIDTH.search(_pattern(node)):
        return "a width of more than 999, or one that is computed, is not allowed"
    return None


def _is_small(node: nodes.Node) -> bool:
    value = getattr(node, "value", None)  # of a literal
    if isinstance(value, str):
        return len(value) <= _LONGEST_REPEATED
    return isinstance(value, int | float) and abs(value) <= _LARGEST


def _pattern(node: nodes.Node) -> str:
    """The literal that a node fills in by its `%` or `{}` fields; empty where it is none."""
    literal = None
    if isinstance(node, nodes.Mod):
        literal = node.left
    elif getattr(node, "name", getattr(node, "attr", "")) in ("format", "format_map"):
        literal = getattr(node, "node", None)  # of a filter or a method
    return str(literal.value) if isinstance(literal, nodes.Const) else ""


# --- rendering -------------------------------------------------------------------------------


def template_writer(template: str, special_tokens: Mapping[str, str]) -> WriteChat:
    """What renders a template without `transformers`. special_tokens: by role, `bos_token`."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    compiled = environment.from_string(template)

    def write(messages: Any, **names: Any) -> str:
        return compiled.render({"messages": messages, **special_tokens, **names})

    return write


def render(make: Callable[[], str], where: str) -> str:
    """What `make` renders, if it does so soon and renders anything.

    Raises:
        InputError: if it fails, takes too long, or gives nothing, or far too much.
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
        raise InputError(f"{where}chat template: not rendered after {RENDER_S:.0f} s")
    if errors:
        line = said_by(errors[0]) or type(errors[0]).__name__
        raise InputError(f"{where}chat template: {line}") from errors[0]
    (text,) = texts
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"{where}chat template: renders {len(text):,} characters")
    return text

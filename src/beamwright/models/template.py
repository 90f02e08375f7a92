"""Chat templates are programs that a model folder brings along: they are given bounds.

`transformers` renders them in Jinja's sandbox, which keeps them from everything but memory and
time.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from beamwright.errors import InputError

RENDER_S = 5.0
_POWER = ("operator", "**")
MOST_CHARACTERS = 1 << 24


def check_template(template: Any, where: str) -> None:
    """Refuse a power: it is computed in one go, which nothing can interrupt.

    template: of a tokenizer; several go by name.

    Raises:
        InputError: if there is one.
    """
    from jinja2 import Environment, TemplateSyntaxError  # noqa: PLC0415 (comes with transformers)

    for text in template.values() if isinstance(template, dict) else [template]:
        if not isinstance(text, str):
            continue
        try:
            lexed = Environment().lex(text)
            tokens = [(kind, value) for _, kind, value in lexed if kind != "whitespace"]
        except TemplateSyntaxError:
            continue  # said by whoever renders it
        # Behind a bracket or a comma it hands on arguments.
        if any(b == _POWER and a[1] not in ("(", ",") for a, b in pairwise(tokens)):
            raise InputError(f"{where}: chat template: powers (**) are not allowed")


def render(make: Callable[[], str], where: str) -> str:
    """What `make` renders, if it does so soon and renders anything.

    Raises:
        InputError: if it fails, takes too long, or gives nothing, or far too much.
    """
    found: list[str] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True, name="chat template")
    thread.start()
    thread.join(RENDER_S)
    if thread.is_alive():
        assert thread.ident is not None
        stop, raised = ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(stop, raised)
        raise InputError(f"{where}chat template: not rendered after {RENDER_S:.0f} s")
    if failed:
        line = " ".join(str(failed[0]).split()) or type(failed[0]).__name__
        raise InputError(f"{where}chat template: {line}") from failed[0]
    (text,) = found
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"{where}chat template: renders {len(text):,} characters")
    return text

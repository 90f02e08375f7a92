"""Declarations: those that a test makes, and what tests of every declared strategy need of one."""

from contextlib import contextmanager
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from beamwright import registry
from beamwright.search import STRATEGIES
from engines import CHAT

SHORT_STEPS = "3,6,20"


def value_of(info):
    """A legal value of an option that is not its default."""
    kinds = [each for each in (get_args(info.annotation) or [info.annotation])]
    if get_origin(info.annotation) is Literal:
        return next(choice for choice in kinds if choice != info.default)
    if str in kinds:
        return "Say it again: {solutions}"
    if bool in kinds:
        return not info.default
    limits = {type(each): each for each in info.metadata}
    low = limits[Ge].ge if Ge in limits else limits[Gt].gt if Gt in limits else 0
    high = limits[Le].le if Le in limits else limits[Lt].lt if Lt in limits else low + 30
    found = (low + high) / 2
    value = int(found) if int in kinds else found
    return value if value != info.default else value + (high - value) / 2


def samples():
    """(option, value) of every option that a strategy has."""
    return {
        name: value_of(row.options[name]) for row in STRATEGIES.values() for name in row.options
    }


def real_options(name, reply_tokens=10, **changes):
    """Options with which a strategy runs on the tiny model."""
    row, options = STRATEGIES[name], {"search": name}
    if row.step_limits is not None:
        options["step_limits"] = SHORT_STEPS
    if hasattr(row.make(), "turns"):
        options |= {"chat_template": CHAT, "max_tokens": reply_tokens, "max_rounds": 20}
        if "critique_prompt" in row.options:
            options["critique_prompt"] = "be"
        if "aggregate_prompt" in row.options:
            options |= {"aggregate_prompt": "{solutions}", "aggregate_rounds": 1}
    return {**changes, **options}


@contextmanager
def restored():
    """Forget on leaving what was declared inside."""
    before = [dict(table) for table in registry._TABLES]
    try:
        yield
    finally:
        for table, rows in zip(registry._TABLES, before, strict=False):
            table.clear()
            table.update(rows)

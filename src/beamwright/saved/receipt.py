"""A receipt: what an answer's tree was, and all that it follows from, as one JSON object.

Whoever has it, the models and this program can grow the tree again (`beamwright verify`), with
another memory number and schedule, too: these change the time alone, and are not in it.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.io import describe_fault
from beamwright.tree import Conversation, Node, Problem, RawPrompt

FORMAT = "beamwright receipt 1"
BESIDE = ("choose", "device", "attention", "token_budget", "stop_votes", "stop_confidence")
"""Settings that are in a receipt beside those that a checkpoint has: which candidate is the answer,
where the last bits come from, and what may have ended the search."""

_DIGITS = 16
_Text = Annotated[str, Strict()]
_Flag = Annotated[bool, Strict()]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Receipt:
    """What is written.

    rounds: see `round_digests`. problem: as `asked_as` writes it. prompt: digest of its token ids.
    settings: by option, those alone that have a value. unrepeatable: why the tree cannot be grown
    again. recomputed: KV of it was computed again, of a checkpoint or of what was evicted.
    generator, verifier: see `models.digest`; None of what has no files, or whose files are gone.
    """

    format: Literal["beamwright receipt 1"]
    tree_hash: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    rounds: tuple[_Text, ...]
    problem_id: Annotated[int, Strict()] | _Text
    problem: Any
    prompt: _Text
    settings: dict[str, Any]
    exact: _Flag
    recomputed: _Flag
    unrepeatable: _Text | None
    generator: dict[str, Any] | None
    verifier: dict[str, Any] | None
    machine: dict[str, _Text | None]
    versions: dict[str, _Text]


def read_receipt(content: Any, where: str) -> Receipt:
    """Raises InputError, which begins with `where`, for what is none."""
    try:
        return TypeAdapter(Receipt).validate_python(content)
    except ValidationError as error:
        raise InputError(f"{where}: not a receipt ({describe_fault(error)})") from error


# --- its parts -------------------------------------------------------------------------------


def receipt_settings(settings: Settings, decisive: Mapping[str, Any]) -> dict[str, Any]:
    """By option, what an answer depends on. decisive: what its tree does (`tree_settings`)."""
    parts = (settings.model, settings.search, settings.stop)
    beside = {name: getattr(part, name) for part in parts for name in BESIDE if hasattr(part, name)}
    return {name: value for name, value in {**decisive, **beside}.items() if value is not None}


def prompt_digest(root: Node) -> str:
    """Of the token ids that were read."""
    text = ",".join(map(str, root.token_ids))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def asked_as(problem: Problem | int) -> Any:
    """A problem as JSON: a text is itself. A number: tokens of a synthetic prompt."""
    match problem:
        case Conversation(messages, tools, args):
            asked = {"messages": [*map(dict, messages)], "tools": [*map(dict, tools)]}
            return asked | ({"template_args": dict(args)} if args else {})
        case RawPrompt(given):
            return {"prompt": given if isinstance(given, str) else [*given]}
        case int():
            return {"prompt_tokens": problem}
    return problem


def problem_of(asked: Any, where: str) -> Problem | int:
    """What `asked_as` has written. Raises InputError, which begins with `where`."""
    match asked:
        case str():
            return asked
        case {"messages": [*messages], "tools": [*tools]} if all(
            isinstance(each, dict) and {"role", "content"} <= each.keys() for each in messages
        ):
            with suppress(InputError):
                return Conversation(tuple(messages), tuple(tools), asked.get("template_args", {}))
        case {"prompt": str() as text}:
            return RawPrompt(text)
        case {"prompt": [*ids]} if all(type(token) is int for token in ids):
            return RawPrompt(tuple(ids))
        case {"prompt_tokens": number} if type(number) is int and number > 0:
            return number
    raise InputError(f"{where}: not a receipt (its problem is none)")


@cache
def versions() -> Mapping[str, str]:
    """Of this program, and of the packages that compute."""
    program = import_module(__name__.partition(".")[0])
    packages = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return {"beamwright": program.__version__, **packages}


@cache
def processor(device: str) -> str:
    """What computes, by name; of a CPU with the instructions that torch uses."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    names = list[str]()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = next(filter(None, names), platform.processor() or "CPU")
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"

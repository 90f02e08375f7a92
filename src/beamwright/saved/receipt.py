"""Receipts: everything that a search tree follows from, and its hash, as one JSON object.

With a receipt, the models and this program, anyone can repeat the search and compare the tree
(`beamwright verify`). A receipt does not contain the memory budget and the schedule: they change
only the time.
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
from beamwright.io import describe_validation_error
from beamwright.tree import Conversation, Node, Problem, RawPrompt

FORMAT = "beamwright receipt 1"
# Settings that a receipt has in addition to a checkpoint's settings: they decide which candidate is
# the answer, which hardware and kernels round the last bits, and what may have ended the search.
RECEIPT_ONLY = ("choose", "device", "attention", "token_budget", "stop_votes", "stop_confidence")

_DIGITS = 16
_Text = Annotated[str, Strict()]
_Flag = Annotated[bool, Strict()]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Receipt:
    """The content of a receipt, a JSON object that `cli.verify` checks.

    rounds: a digest per round (`tree.round_digests`).
    problem: the problem as `problem_to_json` writes it.
    prompt: the digest of the prompt's token ids.
    settings: the options that have a value, by name.
    exact: True if results on this machine do not depend on the batch.
    recomputed: True if KV was computed again, after resuming from a checkpoint or after eviction.
    unrepeatable: the reason why the search cannot be repeated; None if it can.
    generator, verifier: digests of the models (`models.digest`); None for a model without files, or
        if its files no longer exist.
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
    """Validate JSON data as a receipt.

    Raises:
        InputError: if `content` is not a receipt; the message begins with `where`.
    """
    try:
        return TypeAdapter(Receipt).validate_python(content)
    except ValidationError as error:
        raise InputError(f"{where}: not a receipt ({describe_validation_error(error)})") from error


# --- parts of a receipt ----------------------------------------------------------------------


def receipt_settings(settings: Settings, decisive: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that an answer depends on, by option, without those that are None.

    decisive: the settings that the tree depends on (`tree_settings`).
    """
    parts = (settings.model, settings.search, settings.stop)
    beside = {
        name: getattr(part, name) for part in parts for name in RECEIPT_ONLY if hasattr(part, name)
    }
    return {name: value for name, value in {**decisive, **beside}.items() if value is not None}


def prompt_digest(root: Node) -> str:
    """Return a digest of the token ids of the prompt."""
    text = ",".join(map(str, root.token_ids))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def problem_to_json(problem: Problem | int) -> Any:
    """Convert a problem to JSON data; a text stays a text.

    problem: a problem, or the length in tokens of a synthetic prompt.
    """
    match problem:
        case Conversation(messages, tools, args):
            asked = {"messages": [*map(dict, messages)], "tools": [*map(dict, tools)]}
            return asked | ({"template_args": dict(args)} if args else {})
        case RawPrompt(given):
            return {"prompt": given if isinstance(given, str) else [*given]}
        case int():
            return {"prompt_tokens": problem}
    return problem


def problem_from_json(asked: Any, where: str) -> Problem | int:
    """Convert JSON data by `problem_to_json` back to a problem.

    Raises:
        InputError: if `asked` is not a problem; the message begins with `where`.
    """
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
    raise InputError(f"{where}: not a receipt (its problem is no text, conversation or prompt)")


@cache
def package_versions() -> Mapping[str, str]:
    """Return the versions of Beamwright, torch, transformers and tokenizers, by name."""
    program = import_module(__name__.partition(".")[0])
    packages = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return {"beamwright": program.__version__, **packages}


@cache
def processor_name(device: str) -> str:
    """Return the name of the GPU or CPU; for a CPU with the instruction set that torch uses."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    names = list[str]()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = next(filter(None, names), platform.processor() or "CPU")
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"

"""`openai:URL#NAME` and `vllm:PATH?OPTION=VALUE`: which generator elsewhere is meant. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml

from beamwright.errors import InputError

PLAIN = ":plain"  # one sample, of a model that a Beamwright server searches with


@dataclass(frozen=True)
class FarModel:
    """A generator that runs elsewhere.

    place: a server's base URL, or what vLLM loads. name: of the model, as its server knows it; None
    for the only one there. options: of vLLM's engine.
    """

    kind: Literal["openai", "vllm"]
    place: str
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def far_model(spec: str) -> FarModel:
    """What `--model` says.

    Raises:
        InputError: if it is no such name.
    """
    kind, _, rest = spec.partition(":")
    if kind == "vllm":
        place, _, options = rest.partition("?")
        if not place:
            raise InputError(f"--model {spec}: write vllm:PATH or vllm:hf:ORG/NAME")
        return FarModel("vllm", place, None, _options(spec, options))
    url, _, name = rest.partition("#")
    if not _is_url(url):
        raise InputError(f"--model {spec}: write openai:http://HOST:PORT/v1#NAME")
    return FarModel("openai", url.rstrip("/"), name or None)


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # of a port
        return False


def _options(spec: str, text: str) -> dict[str, Any]:
    found = {}
    for each in text.split("&") if text else ():
        name, equals, value = each.partition("=")
        if not (name.isidentifier() and equals and value):
            raise InputError(f"--model {spec}: {each!r} is no OPTION=VALUE")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise InputError(f"--model {spec}: {name}: {value!r} is no value") from None
    return found

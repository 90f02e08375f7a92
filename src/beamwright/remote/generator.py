"""RemoteGenerator: the generator that `--model` names, and a tokenizer here that says the same.

`openai:URL#NAME` is a model behind a server, `vllm:PATH?OPTION=VALUE&...` one in vLLM's engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import yaml

from beamwright.errors import InputError
from beamwright.io import read_object, read_text
from beamwright.models.config import tokenizer_folder
from beamwright.models.tokenizer import TextCodec
from beamwright.remote.writer import TextSource
from beamwright.sections import ModelSettings


@dataclass(frozen=True)
class RemoteGenerator:
    """codec: of the same tokenizer. context: most tokens of a path."""

    source: TextSource
    codec: TextCodec
    context: int

    @property
    def vocab(self) -> int:
        """Token ids that the tokenizer has."""
        return self.codec.vocab_size

    @classmethod
    def find(cls, settings: ModelSettings) -> RemoteGenerator:
        """What `--model` names, asked whether it is there, and a tokenizer for it.

        Raises:
            InputError: if there is no such model, or nothing says how its prompts are tokenised.
        """
        spec = settings.model
        kind, _, rest = spec.partition(":")
        source: TextSource
        if kind == "vllm":
            from beamwright.remote.vllm import VllmSource  # noqa: PLC0415 (an extra)

            place, _, given = rest.partition("?")
            if not place:
                raise InputError(f"--model {spec}: write vllm:PATH or vllm:hf:ORG/NAME")
            try:
                pairs = parse_qsl(given, strict_parsing=True)
                options = {name: yaml.safe_load(value) for name, value in pairs}
            except (ValueError, yaml.YAMLError):
                raise InputError(f"--model {spec}: {given!r} is no OPTION=VALUE") from None
            folder = tokenizer_folder(place, spec, weights=True)
            codec = TextCodec.load(folder, settings.chat_template, settings.template_args)
            source = VllmSource(folder, options, settings)
        else:
            from beamwright.remote.openai import PLAIN, OpenAISource  # noqa: PLC0415 (HTTP)

            url, _, name = rest.partition("#")
            if not _is_url(url):
                raise InputError(f"--model {spec}: write openai:http://HOST:PORT/v1#NAME")
            folder = _tokenizer_of(settings, name.removesuffix(PLAIN))
            codec = TextCodec.load(folder, settings.chat_template, settings.template_args)
            source = OpenAISource(url.rstrip("/"), name, codec, _read_key(settings.model_key))
        known = source.context or read_object(folder / "config.json").get("max_position_embeddings")
        limits = [limit for limit in (known, settings.context) if isinstance(limit, int) and limit]
        if not limits:
            source.close()
            raise InputError(f"--model {spec}: it does not say its context; give --context N")
        return cls(source, codec, min(limits))


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of brackets that do not close, or a port that is none
        return False


def _tokenizer_of(settings: ModelSettings, name: str) -> Path:
    if settings.tokenizer is not None:
        return tokenizer_folder(settings.tokenizer, f"tokenizer {settings.tokenizer}")
    try:
        return tokenizer_folder(name, f"tokenizer {name}")
    except InputError as error:
        raise InputError(
            f"--model {settings.model}: needs the model's tokenizer here: --tokenizer PATH, "
            "hf:ORG/NAME or bundled"
        ) from error


def _read_key(file: str | None) -> str | None:
    if file is None:
        return None
    words = read_text(Path(file), "--model-key ").split()
    if len(words) != 1 or not words[0].isascii():
        raise InputError(f"--model-key {file}: one key is expected in it")
    return words[0]

"""RemoteGenerator: a model that `--model` names on a server, and a tokenizer that says the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from beamwright.errors import InputError
from beamwright.io import read_object, read_text
from beamwright.models.hub import tokenizer_folder
from beamwright.models.tokenizer import TextCodec
from beamwright.remote.writer import TextSource
from beamwright.sections import ELSEWHERE, ModelSettings


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
        from beamwright.remote.openai import PLAIN, OpenAISource  # noqa: PLC0415 (HTTP)

        url, _, name = spec.removeprefix(ELSEWHERE).partition("#")
        if not _is_url(url):
            raise InputError(f"--model {spec}: write openai:http://HOST:PORT/v1#NAME")
        folder = _tokenizer_of(settings, name.removesuffix(PLAIN))
        codec = TextCodec.load(folder, settings.chat_template, settings.template_args)
        key, login = _read_key(settings.model_key), getattr(spec, "login", "")
        if key and login:
            raise InputError(f"--model {spec}: a login in its URL does not go with --model-key")
        source = OpenAISource(url.rstrip("/"), name, codec, key, login)
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

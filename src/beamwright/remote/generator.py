"""RemoteGenerator: the generator that `--model` names, and a tokenizer here that says the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from beamwright.errors import InputError
from beamwright.io import read_regular
from beamwright.models.config import read_object, tokenizer_folder
from beamwright.models.tokenizer import TextCodec
from beamwright.remote.source import PLAIN, RemoteModel, TextSource
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

    @property
    def token_ids(self) -> bool:
        """It says which tokens it drew; otherwise its texts are tokenised here."""
        return self.source.facts.token_ids

    @classmethod
    def find(cls, settings: ModelSettings) -> RemoteGenerator:
        """What `--model` names, asked whether it is there, and a tokenizer for it.

        Raises:
            InputError: if there is no such model, or nothing says how its prompts are tokenised.
        """
        remote = RemoteModel.of(settings.model)
        folder = _tokenizer_folder(settings, remote)
        codec = TextCodec.load(folder, settings.chat_template)
        source = _source(remote, folder, codec, settings)
        known = source.facts.context or _folder_context(folder)
        limits = [limit for limit in (known, settings.context) if limit is not None]
        if not limits:
            source.close()
            raise InputError(
                f"--model {settings.model}: it does not say its context; give --context N"
            )
        return cls(source, codec, min(limits))


def _source(
    remote: RemoteModel, folder: Path, codec: TextCodec, settings: ModelSettings
) -> TextSource:
    if remote.kind == "vllm":
        from beamwright.remote.vllm import VllmSource  # noqa: PLC0415 (an extra)

        return VllmSource(folder, remote.options, settings)
    from beamwright.remote.openai import OpenAISource  # noqa: PLC0415 (needs an HTTP client)

    return OpenAISource(remote, codec, _read_key(settings.model_key))


def _read_key(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        words = read_regular(Path(file)).decode().split()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "is no text")
        raise InputError(f"--model-key {file}: {why}") from None
    if len(words) != 1 or not words[0].isascii():
        raise InputError(f"--model-key {file}: one key is expected in it")
    return words[0]


def _tokenizer_folder(settings: ModelSettings, remote: RemoteModel) -> Path:
    if remote.kind == "vllm":
        return tokenizer_folder(remote.place, settings.model, weights=True)
    name = settings.tokenizer or (remote.name or "").removesuffix(PLAIN)
    try:
        return tokenizer_folder(name, f"tokenizer {name}")
    except InputError as error:
        if settings.tokenizer is not None:
            raise
        raise InputError(
            f"--model {settings.model}: needs the model's tokenizer here: --tokenizer PATH, "
            "hf:ORG/NAME or bundled"
        ) from error


def _folder_context(folder: Path) -> int | None:
    context = read_object(folder / "config.json").get("max_position_embeddings")
    return context if isinstance(context, int) and context > 0 else None

"""FarGenerator: a generator elsewhere, with a tokenizer here that says the same as its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from beamwright.errors import InputError
from beamwright.files import read_regular
from beamwright.models import TextCodec
from beamwright.models.find import tokenizer_folder
from beamwright.models.json_file import read_object
from beamwright.remote.named import PLAIN, FarModel, far_model
from beamwright.remote.source import TextSource
from beamwright.sections import ModelSettings


@dataclass(frozen=True)
class FarGenerator:
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


def find_generator(settings: ModelSettings) -> FarGenerator:
    """What `--model` names, asked whether it is there, and a tokenizer for it.

    Raises:
        InputError: if there is no such model, or nothing says how its prompts are tokenised.
    """
    far = far_model(settings.model)
    folder = _tokenizer_folder(settings, far)
    codec = TextCodec.load(folder, settings.chat_template)
    source = _source(far, folder, codec, settings)
    limits = [source.facts.context or _folder_context(folder), settings.context]
    known = [limit for limit in limits if limit is not None]
    if not known:
        source.close()
        raise InputError(f"--model {settings.model}: it does not say its context; give --context N")
    return FarGenerator(source, codec, min(known))


def _source(far: FarModel, folder: Path, codec: TextCodec, settings: ModelSettings) -> TextSource:
    if far.kind == "vllm":
        from beamwright.remote.vllm import VllmSource  # noqa: PLC0415 (an extra)

        return VllmSource(folder, far.options, settings)
    from beamwright.remote.openai import OpenAISource  # noqa: PLC0415 (needs an HTTP client)

    return OpenAISource(far, codec, _read_key(settings.model_key))


def _read_key(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        found = read_regular(Path(file)).decode().split()
    except (OSError, ValueError) as error:
        raise InputError(
            f"--model-key {file}: {getattr(error, 'strerror', 'is no text')}"
        ) from None
    if len(found) != 1 or not found[0].isascii():
        raise InputError(f"--model-key {file}: one key is expected in it")
    return found[0]


def _tokenizer_folder(settings: ModelSettings, far: FarModel) -> Path:
    if far.kind == "vllm":
        return tokenizer_folder(far.place, settings.model, weights=True)
    named = settings.tokenizer or (far.name or "").removesuffix(PLAIN)
    try:
        return tokenizer_folder(named, f"tokenizer {named}")
    except InputError as error:
        if settings.tokenizer is not None:
            raise
        raise InputError(
            f"--model {settings.model}: needs the model's tokenizer here: --tokenizer PATH, "
            "hf:ORG/NAME or bundled"
        ) from error


def _folder_context(folder: Path) -> int | None:
    found = read_object(folder / "config.json").get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None

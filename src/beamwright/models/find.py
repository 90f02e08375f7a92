"""Which checkpoint folder an option means, and its shape. Reads no weights, needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

from beamwright.errors import InputError, UnavailableError
from beamwright.models.config import read_shape
from beamwright.models.shape import (
    NAMED_SHAPES,
    ModelShape,
    capped,
    hub_name,
    named_shape,
    shape_from_text,
)
from beamwright.sections import ELSEWHERE, ModelSettings

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_URL = re.compile(r"https?://\S+")
_OLLAMA, _OLLAMA_URL = "ollama:", "http://127.0.0.1:11434/v1"
_GGUF = (
    "or let llama.cpp's server run it, with tree and verifier here: --model openai:URL#NAME "
    "--tokenizer hf:ORG/NAME"
)
_BUNDLED = Path(__file__).parent.parent / "bundled"


def resolve_folder(
    spec: str,
    role: str,
    written: str | None = None,
    known: str = "",
    *,
    weights: bool = True,
) -> Path:
    """The checkpoint folder that `--model` or `--verifier` means.

    role: "generator" or "verifier", the bundled folder that `bundled` stands for;
    `bundled:strong` is the verifier's in either, whose backbone is a generator, too.
    written: the option's value where it says more than `spec`. known: what could be meant where
    there is no such folder. weights: of the hub's, download the weights, too.

    Raises:
        InputError: if there is no such folder; UnavailableError: if the hub cannot be reached.
    """
    if spec.startswith(ELSEWHERE):
        raise InputError(f"{_option(role)} {written or spec}: this needs the model itself, here")
    if spec in ("bundled", "bundled:strong"):
        return _BUNDLED / (role if spec == "bundled" else "verifier")
    if spec.startswith("hf:"):
        return _download(spec.removeprefix("hf:"), weights=weights)
    folder = Path(spec)
    if not folder.is_dir():
        hint = _instead(spec, role) or (f"no such folder; {known}" if known else "no such folder")
        raise InputError(f"{_option(role)} {written or spec}: {hint}")
    if not (folder / "config.json").is_file():
        packed = next(folder.glob("*.gguf"), None)
        hint = "" if packed is None else f"; {packed.name}: {_instead(str(packed), role)}"
        raise InputError(f"{spec}: no config.json in this folder{hint}")
    _check_files(folder)
    return folder


def tokenizer_folder(spec: str, written: str, *, weights: bool = False) -> Path:
    """The folder with the tokenizer that a name means; weights: and with the model's weights.

    ORG/NAME is a model of the hub where there is no such folder, as servers name theirs.

    Raises:
        InputError, UnavailableError: as `resolve_folder`.
    """
    hub = spec.removeprefix("hf:")
    if spec.startswith("hf:") or (_HUB_NAME.fullmatch(spec) and not Path(spec).is_dir()):
        return _download(hub, weights=weights)
    return resolve_folder(spec, "generator", written)


def _option(role: str) -> str:
    return "--model" if role == "generator" else f"--{role}"


def _instead(spec: str, role: str) -> str | None:
    """What to give instead of a place that is no folder; None where nobody can tell."""
    place = Path(spec)
    if place.suffix.lower() == ".gguf":
        weights = "--weights" if role == "generator" else "--verifier-weights"
        return (
            "GGUF files are not read: give the folder or hf:ORG/NAME of the original checkpoint "
            f"(safetensors), with {weights} int4 to make it as small"
            + (f"; {_GGUF}" if role == "generator" else "")
        )
    if place.is_file():
        return "a file; the checkpoint's folder is expected"
    meant = _meant(spec, role)
    return None if meant is None else f"no such folder; did you mean {meant}?"


def _meant(spec: str, role: str) -> str | None:
    """The name of what a spec seems to mean that is no folder."""
    if _HUB_NAME.fullmatch(spec) and not Path(spec).parent.is_dir():
        return f"hf:{spec}"
    if (name := hub_name(spec)) is not None:
        return f"hf:{name}"
    if role == "generator" and _URL.fullmatch(spec):
        return f"openai:{spec}#NAME"
    if role == "generator" and spec.startswith(_OLLAMA):
        return f"openai:{_OLLAMA_URL}#{spec.removeprefix(_OLLAMA)} (docs/scaling.md has more)"
    return None


def _check_files(folder: Path) -> None:
    """A pipe among a model's files would be waited for, a device be read for ever.

    So would some files that the system makes up, which are regular ones by name.
    """
    for file in folder.iterdir():
        made_up = file.is_symlink() and file.resolve().parts[1:2] in (("proc",), ("sys",))
        if made_up or (file.exists() and not file.is_file() and not file.is_dir()):
            raise InputError(f"{file}: not a regular file")


def find_shape(
    settings: ModelSettings, role: str = "generator", written: str | None = None, known: str = ""
) -> ModelShape:
    """The shape that `--model` means; the name of a known model will do. Reads no weights.

    role, written, known: as in `resolve_folder`.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: as loading the model would.
    """
    spec = settings.model
    shape = None if Path(spec).is_dir() else named_shape(spec)
    if shape is None and spec.startswith("random:"):
        shape = shape_from_text(spec.removeprefix("random:"))
    if shape is not None:
        return capped(shape, settings.context)
    shapes = "" if "/" in (written or spec) else f"shapes: {', '.join(NAMED_SHAPES)}"
    hint = "; ".join(filter(None, (known, shapes)))
    folder = resolve_folder(spec, role, written, hint, weights=False)
    return read_shape(folder, settings.context, role)


def _download(name: str, *, weights: bool = True) -> Path:
    """The hub's ORG/NAME[@REVISION], a branch, tag or commit."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow import)

    name, _, revision = name.partition("@")
    patterns = ["*.json", "*.model", "*.jinja", "*.txt", "verifier.yaml", "judge.yaml"]
    patterns += ["*.safetensors", "pytorch_model*.bin"] if weights else []
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds, network and not-found alike
        line = " ".join(str(error).split())[:160]
        raise UnavailableError(
            f"hf:{name}: cannot be downloaded ({type(error).__name__}: {line}); "
            "without a network, pass a local folder"
        ) from error

"""Resolves `--model` and `--verifier` to a local folder or file; downloads from the hub.

Only file names are read here, and the first bytes of GGUF files. Folders are refused if they
contain files that could block a reader, such as pipes and devices.
"""

from __future__ import annotations

import re
from pathlib import Path

from beamwright.errors import InputError, UnavailableError, error_line
from beamwright.models.formats.files import adapter_advice
from beamwright.models.formats.gguf_metadata import GGUF, shards
from beamwright.models.formats.header import is_gguf
from beamwright.sections import ELSEWHERE

BUNDLED = Path(__file__).parent.parent / "bundled"
_ANY_GGUF = "*.[gG][gG][uU][fF]"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_LONGEST_LINE = 200


def resolve_folder(
    spec: str, role: str, written: str | None = None, known: str = "", *, weights: bool = True
) -> Path:
    """Return the checkpoint folder or GGUF file that `--model` or `--verifier` names.

    spec: the option's value. "bundled" is the bundled folder of the `role`. "bundled:strong" is the
        bundled verifier in both roles, because its backbone can also generate. "bundled:thinking"
        is a generator that thinks.
    role: "generator" or "verifier".
    written: what the user wrote, for messages, if it is longer than `spec`.
    known: a hint for the message if there is no such folder.
    weights: False to download a model of the hub without its weights.

    Raises:
        InputError: if there is no such folder, or it has no model that can be read.
        UnavailableError: if the hub cannot be reached.
    """
    option = f"{'--model' if role == 'generator' else '--verifier'} {written or spec}"
    if spec.startswith(ELSEWHERE):
        raise InputError(
            f"{option} runs on a server, but this command needs a local model; give a folder or "
            "hf:ORG/NAME"
        )
    own = {"bundled": role, "bundled:strong": "verifier", "bundled:thinking": "thinking"}
    if spec in own:
        return BUNDLED / own[spec]
    if spec.startswith("hf:"):
        return _download(spec.removeprefix("hf:"), weights=weights)
    folder = Path(spec)
    if is_gguf(folder):
        return shards(folder)[0]
    if not folder.is_dir():
        raise InputError(_vllm_advice(spec) or f"{option}: {_explain_missing(spec, role, known)}")
    if (file := _gguf_in(folder)) is not None:
        return resolve_folder(str(file), role)
    if not (folder / "config.json").is_file():
        raise InputError(f"{spec}: {adapter_advice(folder) or 'no config.json in this folder'}")
    for file in folder.iterdir():
        # Reading a pipe would wait, and reading a device would never end. The same holds for some
        # files below /proc and /sys, although they are regular files.
        made_up = file.is_symlink() and file.resolve().parts[1:2] in (("proc",), ("sys",))
        if made_up or (file.exists() and not file.is_file() and not file.is_dir()):
            raise InputError(f"{file}: not a regular file")
    return folder


def _gguf_in(folder: Path, tag: str = "") -> Path | None:
    """Return a folder's GGUF file, or its first shard; None if the folder has other weights.

    tag: part of the file's name, as in `ORG/NAME:TAG`. With a tag, subfolders are searched too,
        and other weights are ignored.

    Raises:
        InputError: if the folder has several GGUF models.
    """
    files = sorted(folder.rglob(_ANY_GGUF) if tag else folder.glob(_ANY_GGUF))
    files = [file for file in files if tag.lower() in file.name.lower()]
    if not files or (not tag and any(folder.glob("*.safetensors"))):
        return None
    models = [file for file in files if "mmproj" not in file.name and file in shards(file)[:1]]
    if len(models) != 1:
        names = ", ".join(file.name for file in models)[:_LONGEST_LINE]
        raise InputError(f"{folder}: name one GGUF file of this folder: {names}")
    return models[0]


def _vllm_advice(spec: str) -> str | None:
    """Return advice if `spec` names the former option "vllm:MODEL"; None otherwise."""
    kind, _, place = spec.partition(":")
    name = place.removeprefix("hf:").partition("?")[0] or "PATH"
    url = f"openai:http://127.0.0.1:8000/v1#{name}"
    return f"vllm: start `vllm serve {name}`, then pass --model {url}" if kind == "vllm" else None


def _explain_missing(spec: str, role: str, known: str) -> str:
    """Return a message for a `spec` that is not a folder, with a guess at what was meant."""
    folder = Path(spec)
    if folder.is_file():
        if folder.suffix.lower() == GGUF:
            return "not a GGUF file (its first bytes differ); download it again"
        return "this is a file; pass the checkpoint's folder"
    meant = None
    if _HUB_NAME.fullmatch(spec) and not folder.parent.is_dir():
        meant = f"hf:{spec}"
    elif role == "generator" and spec.startswith(("http://", "https://")):
        place = spec.rstrip("/")
        meant = f"openai:{place}{'' if '/' in place.partition('//')[2] else '/v1'}#NAME"
    elif role == "generator" and spec.startswith("ollama:"):
        meant = f"openai:http://127.0.0.1:11434/v1#{spec.removeprefix('ollama:')}"
    hint = known if meant is None else f"did you mean {meant}?"
    what = "no such file" if folder.suffix.lower() == GGUF else "no such folder"
    return f"{what}; {hint}" if hint else what


def tokenizer_folder(spec: str, written: str) -> Path:
    """Return the folder with the tokenizer of a model that runs on a server.

    Servers usually call a model ORG/NAME. If `spec` has this form and is no folder, the model is
    downloaded from the hub without weights. written: as in `resolve_folder`.

    Raises:
        InputError, UnavailableError: as `resolve_folder`.
    """
    hub = spec.removeprefix("hf:")
    if spec.startswith("hf:") or (_HUB_NAME.fullmatch(spec) and not Path(spec).is_dir()):
        return _download(hub, weights=False)
    return resolve_folder(spec, "generator", written)


def _download(name: str, *, weights: bool = True) -> Path:
    """Download ORG/NAME[:GGUF][@REVISION] from the hub, and return its folder or GGUF file.

    REVISION is a branch, tag or commit. GGUF is a part of a file's name, such as Q4_K_M. If GGUF is
    given, only matching GGUF files are downloaded, even if `weights` is False.

    Raises:
        UnavailableError: if the download fails.
        InputError: if there is no such GGUF file.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow import)

    name, _, revision = name.partition("@")
    name, _, tag = name.partition(":")
    patterns = ["*.json", "*.model", "*.jinja", "*.txt", "verifier.yaml", "judge.yaml"]
    patterns += ["*.safetensors", "pytorch_model*.bin"] if weights else []
    if tag:
        patterns = [f"*{each}*{GGUF}" for each in (tag, tag.lower(), tag.upper())]
    try:
        folder = Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the client raises many types, for network errors and others
        raise UnavailableError(
            f"hf:{name}: cannot be downloaded ({error_line(error)}); "
            "without a network, pass a local folder"
        ) from error
    file = _gguf_in(folder, tag) if tag else None
    if tag and file is None:
        raise InputError(f"hf:{name}: no GGUF file has {tag!r:.40} in its name")
    return file or folder

"""What `transformers` is asked for: a checkpoint folder's config, tokenizer and own model.

Not where the files themselves say all: importing it takes longer than a small model's search.

A folder holds data. Code that it brings along (`auto_map`) is never run and never asked about;
where `transformers` has a class of its own for the same thing, that one is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beamwright.errors import InputError, UnsupportedModelError
from beamwright.models.json_file import is_panic, line_of, read_object
from beamwright.models.plain_config import plain_config
from beamwright.models.quiet import no_progress_bar, quiet_import

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "spiece.model",
)  # fmt: skip


def read_config(folder: Path, supported: str) -> Any:
    """The config of a folder as `transformers` has it, which is asked where it takes more than the
    file. supported: what an error, which leaves the folder's name to the caller, lists.

    Raises:
        UnsupportedModelError: if it cannot be read, or stands for code of the folder's own.
    """
    written = read_object(folder / "config.json")
    if (plain := plain_config(written)) is not None:
        return plain
    from transformers import AutoConfig  # noqa: PLC0415 (slow import)

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many kinds; each is about what the file says
        if _brings_code(written, "AutoConfig"):
            raise UnsupportedModelError(f"{_wants_to_run('config.json')}; {supported}") from error
        raise UnsupportedModelError(
            f"config cannot be read ({line_of(error)}); {supported}"
        ) from error


def read_tokenizer(folder: Path, chat_template: str | None = None) -> Any:
    """The `transformers` tokenizer of a folder, or one like it where the files are all of it.

    chat_template: instead of the folder's.

    Raises:
        InputError: if it cannot be read, or stands for code of the folder's own.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(
            f"model {folder}: no tokenizer in this folder (none of {', '.join(_TOKENIZER_FILES)})"
        )
    from beamwright.models.plain_tokenizer import plain_tokenizer  # noqa: PLC0415 (of jinja2)

    if (plain := plain_tokenizer(folder, chat_template)) is not None:
        return plain
    from transformers import AutoTokenizer  # noqa: PLC0415 (slow import)

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except BaseException as error:  # as above
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        file = folder / "tokenizer_config.json"
        if file.is_file() and _brings_code(read_object(file), "AutoTokenizer"):
            raise InputError(f"model {folder}: {_wants_to_run(file.name)}") from error
        line = line_of(error)
        raise InputError(f"model {folder}: its tokenizer cannot be read ({line})") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def read_reference(folder: Path, dtype: Any) -> Any:
    """The folder's model as `transformers` builds it, to compare with."""
    with quiet_import(), no_progress_bar():  # it imports torchao, if that is installed
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 (slow import)

        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )


def read_eos_ids(folder: Path) -> frozenset[int]:
    """The token ids that end a reply, as generation_config.json or else config.json has them.

    Raises:
        InputError: if one of the files is not a JSON object.
    """
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        value = read_object(file).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            return frozenset(each for each in ids if type(each) is int and each >= 0)
    return frozenset()


def _brings_code(written: dict[str, Any], kind: str) -> bool:
    """True if the file names a class of the folder's own for this."""
    named = written.get("auto_map")
    return isinstance(named, list | tuple) or (isinstance(named, dict) and kind in named)


def _wants_to_run(name: str) -> str:
    return f"this folder wants to run its own code (auto_map in {name}), which is never done"

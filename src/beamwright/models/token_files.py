"""Reads the tokenizer of a model's folder or GGUF file, and checks that texts survive encoding.

`tokenizer.json` is read directly: its ids are those that the model was trained with, whatever
`transformers` class the folder names. `tokenizer_config.json` and related files name the special
tokens, further tokens, and the chat template. For a folder without `tokenizer.json`, `transformers`
reads the tokenizer. For a GGUF file, `formats.vocabulary` does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from tokenizers import __version__ as _VERSION

from beamwright.errors import InputError
from beamwright.io import read_json_object, read_text
from beamwright.models.formats import key_tables
from beamwright.models.formats.header import is_gguf
from beamwright.models.formats.vocabulary import TokenizerData, read_vocabulary, split_patterns

FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
)  # fmt: skip
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SENTENCE = "Jack has 70 eggs,  naïve café\n\tand 1234567.\n"
_PLAIN = ("jack has 70 eggs", "1234567")  # parts of _SENTENCE that no normalizer removes
_PUBLISHED = "use the tokenizer files of the published model"
# Maximum number of characters by which a normalizer may replace one; usually it is at most three.
_MOST_GROWTH = 100
_MISTRAL = ("mistral", "mistral3", "ministral", "ministral3", "pixtral", "voxtral")
_LARGE = 100_000  # Mistral's vocabularies with more tokens than this cut texts by words


def read_token_files(folder: Path) -> TokenizerData:
    """Read the tokenizer of a checkpoint's folder or of a GGUF file.

    Raises:
        InputError: if the tokenizer is missing, cannot be read, or would run the folder's own code.
    """
    where = f"model {folder}"
    if is_gguf(folder):
        return read_vocabulary(folder)
    written = _read_optional(folder / "tokenizer_config.json")
    if not (written.get("auto_map") or any((folder / name).is_file() for name in FILES)):
        raise InputError(f"{where}: no tokenizer in this folder (none of {', '.join(FILES)})")
    if not (folder / "tokenizer.json").is_file():
        files = _from_transformers(folder, written, where)
    else:
        files = _from_tokenizer_json(folder, written, where)
    tokenizer, config = files.tokenizer, _read_optional(folder / "config.json")
    roles = {  # config.json names by id the roles that tokenizer_config.json leaves out
        role: tokenizer.id_to_token(index) or ""
        for role in ("bos_token", "eos_token")
        if role not in written and type(index := config.get(f"{role}_id")) is int and index >= 0
    }
    remarks = key_tables.TOKENIZER_CONFIG.check(filter(written.get, written), where)
    generation = _read_optional(folder / "generation_config.json")
    remarks += key_tables.GENERATION.check(filter(generation.get, generation), where)
    remarks += _split_by_words(config, tokenizer, written, where)
    template = _chat_template(folder, written)
    return TokenizerData(tokenizer, {**roles, **files.special_tokens}, template, remarks)


def check_tokenizer(
    tokenizer: Tokenizer, where: str, needed: Collection[str] = ()
) -> tuple[str, ...]:
    """Check that special tokens and one sentence survive encoding and decoding.

    The text of each special token must become the token's own id. Return remarks, one line each,
    about errors that do not make the tokenizer unusable.

    needed: texts, such as the chat template, that contain the special tokens which must work.

    Raises:
        InputError: if words, numbers or a needed token do not survive, or if the normalizer makes a
            text far longer.
    """
    if (growth := _max_growth(tokenizer)) > _MOST_GROWTH:
        line = f"its normalizer turns one character into {growth}"
        raise InputError(f"{where}: its tokenizer cannot be used ({line})")
    own = tokenizer.get_added_tokens_decoder().items()
    added = {index: token.content for index, token in own if token.special}
    coded = tokenizer.encode_batch([*added.values()], add_special_tokens=False)
    decoded = tokenizer.decode_batch([[i] for i in added], skip_special_tokens=False)
    wrong = {
        text: f"{text!r} is token {index}, but encodes to {ids.ids} and decodes to {back!r}"
        for (index, text), ids, back in zip(added.items(), coded, decoded, strict=True)
        if ids.ids != [index] or back.strip() != text.strip()
    }
    remarks = [f"{where}: its tokenizer: {line:.200}" for line in [*wrong.values()][:1]]
    for text, line in wrong.items():
        if any(text in each for each in needed):
            raise InputError(f"{where}: its tokenizer: {line:.200}; {_PUBLISHED}")
    back = tokenizer.decode(tokenizer.encode(_SENTENCE, add_special_tokens=False).ids)
    if back != _SENTENCE:
        line = f"{where}: its tokenizer turns {_SENTENCE!r} into {back!r:.80}"
        if not all(plain in back.casefold() for plain in _PLAIN):
            raise InputError(f"{line}; {_PUBLISHED}")
        remarks.append(line)
    return tuple(remarks)


def _max_growth(tokenizer: Tokenizer) -> int:
    """Return the maximum number of characters by which the normalizer can replace one."""
    normalizer = tokenizer.normalizer
    written = {} if normalizer is None else json.loads(normalizer.__getstate__())
    growth, waiting = 1, [written]
    while waiting:
        part = waiting.pop()
        waiting += part.get("normalizers", [])
        replaced = part.get("pattern", {}).get("String") or "?"
        growth *= max(1, len(part.get("content", "")) // len(replaced))
    return growth


# --- tokenizer.json ----------------------------------------------------------------------------


def _from_tokenizer_json(folder: Path, written: Mapping[str, Any], where: str) -> TokenizerData:
    """Read `tokenizer.json`, and add the tokens that the other files name.

    written: the contents of tokenizer_config.json.

    Raises:
        InputError: if a file is damaged or names a token under another id.
    """
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        line = f"damaged, or written by a later version of tokenizers than {_VERSION}"
        raise InputError(f"{where}: its tokenizer cannot be read ({file.name}: {line})") from error
    if "added_tokens_decoder" not in written:  # written by an older version
        written = {**written, **_read_optional(folder / "special_tokens_map.json")}
    try:
        listed = {int(i): _as_token(t) for i, t in written.get("added_tokens_decoder", {}).items()}
        roles = {
            role: _as_token(text).content
            for role, text in written.items()
            if role.endswith("_token") and isinstance(text, str | Mapping)
        }
        for text, index in _read_optional(folder / "added_tokens.json").items():
            listed.setdefault(int(index), AddedToken(text, special=text in roles.values()))
        further = written.get("extra_special_tokens") or written.get("additional_special_tokens")
        if isinstance(further, Mapping):
            roles = {name: _as_token(t).content for name, t in further.items()} | roles
        more = [*map(_as_token, roles.values()), *map(_as_token, further or ())]
    except (TypeError, ValueError, AttributeError) as error:
        line = "tokenizer_config.json: an added or special token is invalid"
        raise InputError(f"{where}: its tokenizer cannot be read ({line})") from error
    _add_tokens(tokenizer, dict(sorted(listed.items())), more, where)
    return TokenizerData(tokenizer, roles, None)


def _add_tokens(
    tokenizer: Tokenizer, listed: Mapping[int, AddedToken], more: list[AddedToken], where: str
) -> None:
    """Add special and other tokens that `tokenizer.json` lacks to the tokenizer.

    listed: tokens with the ids that they must get. more: special tokens without a given id.

    Raises:
        InputError: if a listed token gets another id.
    """
    new = {t.content: i for i, t in listed.items() if tokenizer.token_to_id(t.content) is None}
    tokenizer.add_tokens([*listed.values()])
    own = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in own if token.special}
    tokenizer.add_tokens([token for token in more if token.content not in special])
    for text, index in new.items():
        if tokenizer.token_to_id(text) != index:
            line = f"{text!r:.60} has id {index}, but tokenizer.json has a gap before it"
            raise InputError(f"{where}: tokenizer_config.json: {line}; {_PUBLISHED}")


def _as_token(value: Any) -> AddedToken:
    """Make a token from its text or JSON object.

    Raises:
        TypeError, AttributeError: if `value` is neither.
    """
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    flags = {name: value[name] for name in _FLAGS if name in value}
    return AddedToken(value.get("content"), **flags)


def _split_by_words(
    config: Mapping[str, Any], tokenizer: Tokenizer, written: Mapping[str, Any], where: str
) -> tuple[str, ...]:
    """Set Mistral's own rule for splitting texts, if the folder has `fix_mistral_regex`.

    Vocabularies of Mistral that were converted by `transformers` before version 5 have a wrong
    rule. Return a remark if the folder may have such a vocabulary without that setting, else ().
    """
    version = str(config.get("transformers_version") or 0).partition(".")[0]
    is_old = config.get("model_type") in _MISTRAL and version.isdigit() and int(version) < 5
    if tokenizer.pre_tokenizer is None or not is_old or tokenizer.get_vocab_size() <= _LARGE:
        return ()
    state = json.loads(tokenizer.pre_tokenizer.__getstate__())
    rules = [part.get("pattern", {}) for part in state.get("pretokenizers", [state])]
    ((by_words,),) = split_patterns("tekken")  # the rule of Mistral's own library
    if {"Regex": by_words} in rules:
        return ()
    if written.get("fix_mistral_regex") is True:
        words = pre_tokenizers.Split(Regex(by_words), behavior="isolated")
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, rest])
        return ()
    line = "tokenizer.json splits texts differently from Mistral's own library"
    way = 'for a model of Mistral, write "fix_mistral_regex": true into tokenizer_config.json'
    return (f"{where}: {line}; {way}",)


# --- chat templates ------------------------------------------------------------------------------


def _chat_template(folder: Path, written: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return a folder's chat template, several by name, or None.

    The template is in *.jinja files, else in tokenizer_config.json, else in chat_template.json,
    which the processors of multimodal models write.
    """
    several = {
        file.stem: read_text(file)
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (file := folder / "chat_template.jinja").is_file():
        several = {"default": read_text(file), **several}
    file = folder / "tokenizer_config.json"
    template = several or written.get("chat_template")
    if not template:
        template = _read_optional(file := folder / "chat_template.json").get("chat_template")
    if isinstance(template, list) and all(isinstance(each, dict) for each in template):
        template = {each.get("name"): each.get("template") for each in template}
    if isinstance(template, dict) and {"default"} == template.keys():
        template = template["default"]
    texts = template.values() if isinstance(template, dict) else [template or ""]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{file}: chat_template must be a text or named texts")
    return template or None


def _read_optional(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}


# --- transformers --------------------------------------------------------------------------------


def _from_transformers(place: Path, written: Mapping[str, Any], where: str) -> TokenizerData:
    """Read a folder's tokenizer with `transformers`.

    Raises:
        InputError: if `transformers` cannot read the tokenizer without the folder's own code.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 (slow import)

    # mistral_format=False: Mistral's own library does not give the texts and bytes of tokens.
    how = {"trust_remote_code": False, "mistral_format": False}
    try:
        loaded = AutoTokenizer.from_pretrained(place, **how)
    except BaseException as error:  # of any type, caused by the files' contents
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        line = (
            "for tokenizer.model pip install sentencepiece protobuf, for tekken.json mistral-common"
        )
        line = f"transformers cannot read it: {line}; or add a tokenizer.json"
        if written.get("auto_map"):
            line = "tokenizer_config.json names code in the folder (auto_map), which is never run"
        raise InputError(f"{where}: its tokenizer cannot be read ({line})") from error
    return from_transformers_tokenizer(loaded, where)


def from_transformers_tokenizer(loaded: Any, where: str = "") -> TokenizerData:
    """Extract the `tokenizers` object, special tokens and template of a `transformers` tokenizer.

    Raises:
        InputError: if the tokenizer is not based on the library `tokenizers`.
    """
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        line = "the tokenizers library cannot use its files; add a tokenizer.json"
        raise InputError(f"{where}: its tokenizer cannot be read ({line})")
    special = {role: str(token) for role, token in loaded.special_tokens_map.items()}
    return TokenizerData(tokenizer, special, loaded.chat_template)


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a Rust library, which `except Exception` misses."""
    return type(error).__module__ == "pyo3_runtime"

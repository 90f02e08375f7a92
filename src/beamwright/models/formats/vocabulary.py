"""Builds the tokenizer that a GGUF file describes: vocabulary, pre-tokenizer and end tokens.

The metadata is interpreted as llama.cpp does. This module needs neither torch nor `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from beamwright.io import read_toml_beside
from beamwright.models.formats.gguf_metadata import raise_if_unsupported, shards
from beamwright.models.formats.header import read_header

_AT = "tokenizer.ggml."
_NORMAL = 1  # GGUF's types of tokens
_CONTROL = 3
_USER_DEFINED = 4
_IN_TEXT = (2, _CONTROL, _USER_DEFINED)  # types that are split off a text before it is tokenized
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # SentencePiece's ids, if the file has none
_ENDING = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


class TokenizerData(NamedTuple):
    """A tokenizer with its special tokens and chat template, as a model's files define them."""

    tokenizer: Tokenizer
    # Texts of special tokens by their role, such as `bos_token`.
    special_tokens: Mapping[str, str]
    # A Jinja template, several templates by name, or None if the files have none.
    chat_template: str | dict[str, str] | None
    # One line for each item that may matter but is not used or is missing.
    remarks: tuple[str, ...] = ()
    # Ids of the tokens that end a reply.
    ends: frozenset[int] = frozenset()
    # True if every prompt begins with `bos_token`, even if the template does not write it.
    adds_bos: bool = False


def split_patterns(name: str) -> list[list[str]]:
    """Return the regular expressions of the pre-tokenizer `name`, a value of `tokenizer.ggml.pre`.

    The result has one list of expressions, or is [] if the name is unknown. Each expression splits
    the pieces that the previous one left.
    """
    return [row["by"] for row in read_toml_beside(__file__)["cuts"] if name in row["names"]]


def read_vocabulary(file: Path) -> TokenizerData:
    """Read the tokenizer and the chat templates of a GGUF file.

    Raises:
        InputError: for a damaged file.
        UnsupportedModelError: for a tokenizer that is not supported, or if the lists of tokens,
            scores and merges contradict each other.
    """
    metadata, where = read_header(shards(file)[0], texts=True).metadata, f"model {file}: {_AT}"
    model, pre = metadata.get(f"{_AT}model"), metadata.get(f"{_AT}pre")
    tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(_read_list(metadata, "tokens", str))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    kinds = _read_list(metadata, "token_type", int) or [_NORMAL] * len(tokens)
    scores = _read_list(metadata, "scores", float, int)
    pairs = [merge.partition(" ")[::2] for merge in _read_list(metadata, "merges", str)]
    cuts, table = split_patterns(pre or "default"), read_toml_beside(__file__)
    ends_anywhere = frozenset(table["ends"])
    merged = chain.from_iterable((*pair, "".join(pair)) for pair in pairs)
    raise_if_unsupported(
        (model not in ("gpt2", "llama"), f"{where}model {model!r:.40} is not gpt2 or llama"),
        (model == "gpt2" and not cuts, f"{where}pre {pre!r:.40} is not supported"),
        (not len(kinds) == len(tokens) == len(vocabulary) > 2, f"{where}tokens are not distinct"),
        (model == "llama" and len(scores) != len(tokens), f"{where}scores has not one per token"),
        (
            model == "gpt2" and not vocabulary.keys() >= {*merged},
            f"{where}merges has unknown tokens",
        ),
    )
    ids = (_SENTENCEPIECE_IDS if model == "llama" else {}) | {
        role: id
        for role in {*_ROLES, *_ENDING}
        if type(id := metadata.get(f"{_AT}{role}_token_id")) is int and 0 <= id < len(tokens)
    }
    special = {name: tokens[ids[role]] for role, name in _ROLES.items() if role in ids}
    # In Gemma's vocabulary </s> is an HTML tag, which is not a control token.
    named = zip(range(len(tokens)), tokens, kinds, strict=True)
    ends = {
        id
        for id, text, kind in named
        if text in ends_anywhere and (kind == _CONTROL or text != "</s>")
    }
    ends |= {ids[role] for role in _ENDING if role in ids}
    if model == "llama":
        blank = metadata.get(f"{_AT}add_space_prefix", True)
        normal = [text if kind == _NORMAL else "" for text, kind in zip(tokens, kinds, strict=True)]
        merges = _list_merges(normal, scores, vocabulary)
        tokenizer = _sentencepiece_tokenizer(vocabulary, merges, special["unk_token"], blank)
    else:
        tokenizer = _byte_level_tokenizer(vocabulary, pairs, *cuts, is_whole=pre in table["whole"])
    tokenizer.add_tokens([
        AddedToken(text, normalized=False, special=kind != _USER_DEFINED or id in ends)
        for id, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in _IN_TEXT or id in ends
    ])  # fmt: skip
    at, line = "tokenizer.chat_template", "pre is missing, so text may be split differently"
    several = {
        key.removeprefix(at).removeprefix(".") or "default": text
        for key, text in metadata.items()
        if (key == at or key.startswith(f"{at}.")) and isinstance(text, str)
    }
    return TokenizerData(
        tokenizer,
        special,
        several["default"] if several.keys() == {"default"} else several or None,
        (f"{where}{line}; use a newer file",) if model == "gpt2" and not pre else (),
        frozenset(ends),
        bool(metadata.get(f"{_AT}add_bos_token", model == "llama" or pre in table["bos"])),
    )


def _read_list(metadata: dict[str, Any], name: str, *kinds: type) -> list[Any]:
    """Return a list in the tokenizer's metadata; [] if it is missing or not of these types."""
    values = metadata.get(f"{_AT}{name}")
    return values if isinstance(values, list) and {*map(type, values)} <= {*kinds} else []


def _byte_level_tokenizer(
    vocabulary: dict[str, int], merges: list[Any], cuts: list[str], *, is_whole: bool
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=is_whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in cuts),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _list_merges(
    normal: list[str], scores: list[float], tokens: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary, those with the best scores first.

    A merge is a pair of tokens whose texts together are the text of a normal token.
    """
    order = sorted(range(len(normal)), key=scores.__getitem__, reverse=True)
    return [
        (first, second)
        for number in order
        for at in range(1, len(normal[number]))
        if (first := normal[number][:at]) in tokens and (second := normal[number][at:]) in tokens
    ]


def _sentencepiece_tokenizer(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], unknown: str, blank: bool
) -> Tokenizer:
    """Build a SentencePiece tokenizer.

    blank: True to add a space before each text, also after a special token.
    """
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer, under = Tokenizer(model), "\u2581"
    before = [normalizers.Prepend(under)] if blank else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", under)])
    parts = [decoders.Replace(under, " "), decoders.ByteFallback(), decoders.Fuse()]
    after = [decoders.Strip(" ", 1, 0)] if blank else []
    tokenizer.decoder = decoders.Sequence([*parts, *after])
    return tokenizer

"""A GGUF file's own tokenizer: its vocabulary, how text is cut before merging, what ends a text.

Made here of what the file says, and as llama.cpp reads it. Needs neither torch nor `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from beamwright.models.formats.described import refuse, shards
from beamwright.models.formats.header import read_header
from beamwright.models.formats.known import ENDING

_AT = "tokenizer.ggml."
_NORMAL = 1  # types of tokens
_CONTROL = 3
_USER_DEFINED = 4
_IN_TEXT = (2, _CONTROL, _USER_DEFINED)  # of what a text holds they are taken out first
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_OF_PIECES = {"bos": 1, "eos": 2, "unknown": 0}  # where a SentencePiece file does not say
_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    # Behind what was asked to fill a gap: padding, another repository, another file.
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
))  # fmt: skip
"""Texts of tokens that end a reply whatever a file calls its end, as in llama.cpp."""

# --- how text is cut before it is merged ---------------------------------------------------------

_SHORT = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters that have a case, without those of alphabets that got theirs late.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7ff"
    r"\uab30-\uab68\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df1e}]]+"
)


def _words(
    digits: str, letters: str = r"\p{L}", apart: str = r"\p{L}\p{N}", end: str = r"[\r\n]*"
) -> str:
    """As GPT-4 cuts. digits: how many stay together. apart: what marks are none of; end: what
    stands behind them."""
    return (
        rf"(?i:{_SHORT})|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}{digits}"
        rf"| ?[^\s{apart}]+{end}|{_BLANKS}"
    )


def _by_case(digits: str, short: str = "") -> str:
    """As GPT-4o cuts: a capital begins a word."""
    return (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        rf"{short}|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{short}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
    )


_CUTS: dict[str, tuple[str, ...]] = {
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe "
    "chatglm-bpe glm4 glm5": (_words("{1,3}"),),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": (
        _words(""),
    ),
    "qwen35": (_words("", r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}"),),
    "minicpm5": (r"\p{N}{1,3}", _words("+")),
    "tekken": (_by_case(""),),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (_by_case("{1,3}", f"(?i:{_SHORT})?"),),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling": (_GPT2,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (r"\p{N}", _GPT2),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "deepseek-llm": (
        r"[\r\n]", rf"\s?{_CASED}",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$", _HAN, r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (
        r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
    ),
    "bailingmoe bailingmoe2 llada-moe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "seed-coder": (_words("", apart=r"\p{L}\p{N}\r\n", end=""),),
}  # fmt: skip
"""By names of `tokenizer.ggml.pre`: expressions, each of which cuts what those before it left."""
_WHOLE = frozenset((
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "tekken", "glm4", "glm5", "minicpm5",
))  # fmt: skip
"""Those whose vocabulary comes before its merges: a word that is a token is that token."""
_BOS = _WHOLE - {"glm4", "glm5", "minicpm5"}
"""Those that begin a prompt with BOS where the file does not say."""


class TokenFiles(NamedTuple):
    """What the files of a tokenizer say.

    special_tokens: texts by role, `bos_token` and so on. chat_template: a text, several by name, or
    None. remarks: a line each. ends: ids that end a reply. adds_bos: a prompt begins with
    `bos_token`, whatever its template writes.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    chat_template: str | dict[str, str] | None
    remarks: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    adds_bos: bool = False


def read_vocabulary(file: Path) -> TokenFiles:
    """The tokenizer and the chat templates of a GGUF file.

    Raises:
        InputError: for a damaged file; UnsupportedModelError: for a tokenizer that is not read, or
            lists that make none.
    """
    found, where = read_header(shards(file)[0], texts=True).metadata, f"model {file}: {_AT}"
    model, pre = found.get(f"{_AT}model"), found.get(f"{_AT}pre")
    tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(_list(found, "tokens", str))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    kinds = _list(found, "token_type", int) or [_NORMAL] * len(tokens)
    scores = _list(found, "scores", float, int)
    pairs = [merge.partition(" ")[::2] for merge in _list(found, "merges", str)]
    cuts = [cuts for names, cuts in _CUTS.items() if (pre or "default") in names.split()]
    merged = chain.from_iterable((*pair, "".join(pair)) for pair in pairs)
    refuse(
        (model not in ("gpt2", "llama"), f"{where}model is {model!r:.40}: gpt2 and llama are read"),
        (model == "gpt2" and not cuts, f"{where}pre is {pre!r:.40}: how it cuts is not known here"),
        (not len(kinds) == len(tokens) == len(vocabulary) > 2, f"{where}tokens: some are equal"),
        (model == "llama" and len(scores) != len(tokens), f"{where}scores: not one for each token"),
        (
            model == "gpt2" and not vocabulary.keys() >= {*merged},
            f"{where}merges: not of its tokens",
        ),
    )
    ids = (_OF_PIECES if model == "llama" else {}) | {
        role: id
        for role in {*_ROLES, *ENDING}
        if type(id := found.get(f"{_AT}{role}_token_id")) is int and 0 <= id < len(tokens)
    }
    special = {name: tokens[ids[role]] for role, name in _ROLES.items() if role in ids}
    # Gemma has </s> as a tag of HTML.
    named = zip(range(len(tokens)), tokens, kinds, strict=True)
    ends = {
        id for id, text, kind in named if text in _ENDS and (kind == _CONTROL or text != "</s>")
    }
    ends |= {ids[role] for role in ENDING if role in ids}
    if model == "llama":
        blank = found.get(f"{_AT}add_space_prefix", True)
        normal = [text if kind == _NORMAL else "" for text, kind in zip(tokens, kinds, strict=True)]
        merges = _pairs(normal, scores, vocabulary)
        tokenizer = _pieces(vocabulary, merges, special["unk_token"], blank)
    else:
        tokenizer = _byte_level(vocabulary, pairs, *cuts, is_whole=pre in _WHOLE)
    tokenizer.add_tokens([
        AddedToken(text, normalized=False, special=kind != _USER_DEFINED or id in ends)
        for id, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in _IN_TEXT or id in ends
    ])  # fmt: skip
    at, line = "tokenizer.chat_template", "pre is not there: text may be cut in the wrong places"
    several = {
        key.removeprefix(at).removeprefix(".") or "default": text
        for key, text in found.items()
        if (key == at or key.startswith(f"{at}.")) and isinstance(text, str)
    }
    return TokenFiles(
        tokenizer,
        special,
        several["default"] if several.keys() == {"default"} else several or None,
        (f"{where}{line}: take a newer file",) if model == "gpt2" and not pre else (),
        frozenset(ends),
        bool(found.get(f"{_AT}add_bos_token", model == "llama" or pre in _BOS)),
    )


def _list(found: dict[str, Any], name: str, *kinds: type) -> list[Any]:
    """One of its lists; an empty one where there is none of these kinds."""
    values = found.get(f"{_AT}{name}")
    return values if isinstance(values, list) and {*map(type, values)} <= {*kinds} else []


def _byte_level(
    vocabulary: dict[str, int], merges: list[Any], cuts: tuple[str, ...], *, is_whole: bool
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=is_whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in cuts),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pairs(
    normal: list[str], scores: list[float], tokens: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Neighbours that SentencePiece merges, first those whose token has the best score."""
    order = sorted(range(len(normal)), key=scores.__getitem__, reverse=True)
    return [
        (first, second)
        for number in order
        for at in range(1, len(normal[number]))
        if (first := normal[number][:at]) in tokens and (second := normal[number][at:]) in tokens
    ]


def _pieces(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], unknown: str, blank: bool
) -> Tokenizer:
    """SentencePiece's. blank: before each text, also behind a special token."""
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer, under = Tokenizer(model), "\u2581"
    before = [normalizers.Prepend(under)] if blank else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", under)])
    parts = [decoders.Replace(under, " "), decoders.ByteFallback(), decoders.Fuse()]
    after = [decoders.Strip(" ", 1, 0)] if blank else []
    tokenizer.decoder = decoders.Sequence([*parts, *after])
    return tokenizer

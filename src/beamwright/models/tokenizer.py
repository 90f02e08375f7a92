"""TextCodec: text to token ids and back, chat template, and the bytes of each token.

Thin over `tokenizers`, read by `transformers`. Prompts are rendered once; after that everything is
token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from beamwright.errors import InputError, line_of
from beamwright.io import read_object
from beamwright.models.config import BUNDLED, read_eos_ids
from beamwright.models.formats.described import GGUF
from beamwright.models.template import (
    WriteChat,
    check_template,
    names_read,
    render,
    template_writer,
)
from beamwright.models.thinking import ThoughtMarks, template_switch

PLACE = "\ue000"  # stands for a text to come: a private character that no template touches
_PIECE = 1 << 16  # characters that are tokenised at a time where only their number matters
_MOST_GROWTH = 100  # a blank becomes three characters, a digit or a ligature a few
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "spiece.model",
)  # fmt: skip


class TextCodec:
    """One model's tokenizer and chat template.

    eos_ids: every token id that ends a path. special_tokens: by role, `bos_token` and so on.
    chat_template: a text, or several by name; None where there is none. write: renders it.
    template_args: what else it is given, by name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int] = frozenset(),
        special_tokens: Mapping[str, str] = MappingProxyType({}),
        chat_template: str | dict[str, str] | None = None,
        write: WriteChat | None = None,
    ) -> None:
        self.template_args: Mapping[str, Any] = {}
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._write = write
        ids = {role: tokenizer.token_to_id(token) for role, token in special_tokens.items()}
        self.bos_id: int | None = ids.get("bos_token")
        last: int | None = ids.get("eos_token")
        self.eos_ids = eos_ids if last is None else eos_ids | {last}

    @classmethod
    def load(
        cls,
        folder: Path,
        chat_template: str | None = None,
        template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> TextCodec:
        """Read the tokenizer of a checkpoint folder.

        chat_template: a Jinja template, or the path of a file that holds one.

        Raises:
            InputError: if the tokenizer or the template cannot be read, or the tokenizer stands for
                code of the folder's own.
        """
        template = None if chat_template is None else _template_text(chat_template)
        is_gguf = folder.suffix == GGUF
        if not is_gguf and not any((folder / name).is_file() for name in _FILES):
            raise InputError(
                f"model {folder}: no tokenizer in this folder (none of {', '.join(_FILES)})"
            )
        if folder.parent == BUNDLED and template is None:
            codec = _bundled(folder)
        else:
            codec = _by_transformers(folder, template)
        check_template(codec.chat_template, f"model {folder}")
        if (growth := _growth(codec.tokenizer)) > _MOST_GROWTH:
            line = f"its normalizer makes {growth} characters of one"
            raise InputError(f"model {folder}: its tokenizer cannot be used ({line})")
        codec.eos_ids |= read_eos_ids(folder)
        codec.template_args = template_args
        return codec

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def thoughts(self) -> ThoughtMarks | None:
        """What begins and ends its thoughts; None for a model that marks none."""
        return ThoughtMarks.of(self.tokenizer, self.encode, self.token_bytes)

    @property
    def takes_instructions(self) -> bool:
        """True if the chat template shows an instruction as something else than a problem.

        One that writes both alike is of a model that only goes on with a text.
        """
        if self.chat_template is None:
            return False
        problem = {"role": "user", "content": "?"}
        said = ({"role": role, "content": PLACE} for role in ("system", "user"))
        try:
            return len({self.chat([turn, problem]) for turn in said}) > 1
        except InputError:  # there is no such role, or it minds who speaks after whom
            return True

    @cached_property
    def has_system_role(self) -> bool:
        """True if the chat template shows a system message."""
        messages = [{"role": "system", "content": PLACE}, {"role": "user", "content": "?"}]
        try:
            return PLACE in self.chat(messages, add_generation_prompt=True)
        except InputError:
            return False

    def switch(self, thinking: str | int) -> dict[str, Any]:
        """Arguments of the chat template for `--thinking`, where they are not given already."""
        names = names_read(self.chat_template) - self.template_args.keys()
        return {} if thinking == "auto" else template_switch(names, thinking)

    def render(
        self,
        problem: str,
        system_prompt: str | None = None,
        template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Token ids of the prompt: the chat template, or the plain text where there is none.

        system_prompt: in a message of its own, or before the problem where there is no such role;
        an empty one is none. template_args: before those of the codec.
        """
        said = [{"role": "user", "content": problem}]
        return self.encode_prompt(self.conversation(said, system_prompt, (), template_args))

    @cached_property
    def takes_tools(self) -> bool:
        """True if the chat template shows functions that may be called."""
        template = self.chat_template
        texts = template.values() if isinstance(template, dict) else [template]
        return any(isinstance(text, str) and "tools" in text for text in texts)

    def unread(self, template_args: Mapping[str, Any]) -> list[str]:
        """Names of arguments that the chat template does not read."""
        return sorted(template_args.keys() - names_read(self.chat_template))

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        system_prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """A conversation as text for `encode_prompt`, up to where its reply begins.

        system_prompt: where nobody has said anything as the system or the developer.
        template_args: before those of the codec.

        Raises:
            InputError: if the chat template fails, or there are tools that it does not show.
        """
        turns = [dict(message) for message in messages]
        for turn in turns:
            if turn["role"] == "developer":
                turn["role"] = "system"
        if system_prompt and not any(turn["role"] == "system" for turn in turns):
            turns.insert(0, {"role": "system", "content": system_prompt})
        if tools and not self.takes_tools:
            raise InputError("tools: the model's chat template shows none")
        if self.chat_template is None:
            return "".join(f"{turn['content']}\n\n" for turn in turns)
        if not self.has_system_role:
            turns = _without_system(turns)
        given = {**template_args, **({"tools": [*map(dict, tools)]} if tools else {})}
        return self.chat(turns, add_generation_prompt=True, given=given)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt's text; a chat template has put its special tokens into it."""
        if self.chat_template is not None:
            return self.encode(text)
        return list(self._encode([text], add_special_tokens=True)[0].ids)

    def render_turn(
        self, text: str, template_args: Mapping[str, Any] = MappingProxyType({})
    ) -> list[int]:
        """Token ids from the end of an assistant's reply, through a user's turn, to the next reply.

        template_args: before those of the codec.

        Raises:
            InputError: if there is no chat template, or it does not show a reply as it is.
        """
        if self.chat_template is None:
            raise InputError("asking a model again needs a chat template (--chat-template)")
        users = [{"role": "user", "content": said} for said in ("?", text)]
        reply = {"role": "assistant", "content": PLACE}
        messages = [users[0], reply, users[1]]
        said = self.chat(messages, add_generation_prompt=True, given=template_args)
        _, place, after = said.rpartition(PLACE)
        if not place:
            raise InputError("chat template: it leaves out what the assistant has said")
        return self.encode(after)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        name: str | None = None,
        *,
        add_generation_prompt: bool = False,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """A conversation as text, special tokens included. name: what an error names. given: to the
        template by name, before the codec's arguments.

        Raises:
            InputError: if the chat template fails.
        """
        if self._write is None:
            raise InputError(f"{name or 'the model'}: chat template: there is none")
        make = partial(
            self._write,
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **{**self.template_args, **given},
        )
        return render(make, f"{name}: " if name else "")

    def is_longer(self, text: str, num_tokens: int) -> bool:
        """True if a text has more tokens than that, without looking at the rest of it."""
        count = 0
        for start in range(0, len(text), _PIECE):
            # What a cut splits is a token more; so long a text may have some more.
            count += len(self.encode(text[start : start + _PIECE])) - 1
            if count > num_tokens:
                return True
        return False

    def encode(self, text: str) -> list[int]:
        """Token ids of text that already holds its special tokens."""
        return list(self._encode([text])[0].ids)

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
        """Token ids and character spans of each text (which holds its special tokens)."""
        coded = self._encode(texts)
        return [text.ids for text in coded], [text.offsets for text in coded]

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[Any]:
        try:
            coded: list[Any] = self.tokenizer.encode_batch(
                list(texts), add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise InputError(f"the model's tokenizer: {line_of(error)}") from error
        return coded

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a path's tokens, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """Text of a reply's tokens, without the marks of thoughts."""
        marks = self.thoughts
        return self.decode(token_ids if marks is None else marks.shown(token_ids))

    def reply_grown(self, text: str, token_ids: Sequence[int]) -> str | None:
        """What a reply of this text says with these tokens behind its own; None where to know that
        takes all of them: bytes follow bytes, but for a character that is not whole yet."""
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}")
        joins = whole and self.thoughts is None and isinstance(self.tokenizer.decoder, ByteLevel)
        return text + self.decode(token_ids) if joins else None

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included as their text."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """What each token id adds to the text, as bytes; special tokens add nothing.

        Those of a path are the bytes of `decode`, except that where a character is not whole (or
        bytes are none) the text has U+FFFD, and that SentencePiece's tokenizers leave out the blank
        before a text.
        """
        added = self.tokenizer.get_added_tokens_decoder()
        # The decoder's JSON; that of the whole tokenizer has the vocabulary in it.
        decoder = self.tokenizer.decoder
        is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        table = _byte_level_table() if is_byte_level else None
        pieces: list[bytes] = []
        for index in range(self.vocab_size):
            piece = self.tokenizer.id_to_token(index) or ""
            if index in added:
                pieces.append(b"" if added[index].special else added[index].content.encode())
            elif table is not None:
                pieces.append(bytes(table[char] for char in piece if char in table))
            elif match := _BYTE_TOKEN.match(piece):
                pieces.append(bytes([int(match[1], 16)]))
            else:
                pieces.append(piece.replace("\u2581", " ").encode())
        return pieces


def _without_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For a template without that role: its texts go before what the user says next."""
    turns: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(str(message["content"]))
        elif message["role"] == "user" and waiting:
            turns.append({**message, "content": "\n\n".join([*waiting, str(message["content"])])})
            waiting = []
        else:
            turns.append(dict(message))
    if waiting:
        turns.append({"role": "user", "content": "\n\n".join(waiting)})
    return turns


def _template_text(chat_template: str) -> str:
    path = Path(chat_template)
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        pass  # a long literal template is no file name
    if "{" not in chat_template:
        raise InputError(f"--chat-template {chat_template!r}: no such file, and not a template")
    return chat_template


def _growth(tokenizer: Tokenizer) -> int:
    """How many characters the normalizer's replacements make of one, at the most."""
    normalizer = tokenizer.normalizer
    written = {} if normalizer is None else json.loads(normalizer.__getstate__())
    growth, waiting = 1, [written]
    while waiting:
        part = waiting.pop()
        waiting += part.get("normalizers", [])
        replaced = part.get("pattern", {}).get("String") or "?"
        growth *= max(1, len(part.get("content", "")) // len(replaced))
    return growth


def _byte_level_table() -> dict[str, int]:
    """GPT-2's alphabet: which character stands for which byte.

    A printable byte of Latin-1 is its own character; the others are numbered from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in sorted(printable)}
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}


def _bundled(folder: Path) -> TextCodec:
    """The tokenizer of the bundled pair: importing `transformers` takes longer than its search."""
    written = read_object(folder / "tokenizer_config.json")
    special = {role: written[role] for role in ("bos_token", "eos_token", "pad_token")}
    template: str = written["chat_template"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    write = template_writer(template, special)
    return TextCodec(tokenizer, frozenset(), special, template, write)


def _by_transformers(folder: Path, chat_template: str | None) -> TextCodec:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415 (slow import)

    try:
        if folder.suffix == GGUF:
            loaded = PreTrainedTokenizerFast.from_pretrained(folder.parent, gguf_file=folder.name)
        else:
            loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except BaseException as error:  # of many kinds; each is about what the files say
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        file = folder / "tokenizer_config.json"
        line = line_of(error)
        if file.is_file() and read_object(file).get("auto_map"):
            line = f"this folder wants to run its own code (auto_map in {file.name}): never done"
        raise InputError(f"model {folder}: its tokenizer cannot be read ({line})") from error
    for made_of in ("_vocab", "_merges"):  # 60 MB of a vocabulary of 150,000; the backend has both
        vars(loaded).pop(made_of, None)
    return wrapped(loaded, chat_template, f"model {folder}")


def wrapped(loaded: Any, chat_template: str | None = None, where: str = "") -> TextCodec:
    """The codec of a tokenizer of `transformers`. chat_template: instead of its own.

    Raises:
        InputError: if it is none over `tokenizers`.
    """
    if chat_template is not None:
        loaded.chat_template = chat_template
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        kind = type(loaded).__name__
        raise InputError(f"{where}: its tokenizer cannot be read ({kind}: not of `tokenizers`)")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = {role: str(token) for role, token in loaded.special_tokens_map.items()}
    write = None
    if loaded.chat_template is not None:
        write = partial(loaded.apply_chat_template, tokenize=False)
    return TextCodec(tokenizer, frozenset(), special, loaded.chat_template, write)


def _is_panic(error: BaseException) -> bool:
    """True for what a library written in Rust gives up with, which is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"

"""TextCodec: text to token ids and back, chat template, and the bytes of each token.

Thin over `tokenizers` and `transformers`. Prompts are rendered once; after that everything is
token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from beamwright.errors import InputError
from beamwright.models.json_file import is_panic, line_of
from beamwright.models.pretrained import read_eos_ids, read_tokenizer
from beamwright.models.template import check_template, render

PLACE = "\ue000"  # stands for a text to come: a private character that no template touches
_PIECE = 1 << 16  # characters that are tokenised at a time where only their number matters
_MOST_GROWTH = 100  # a blank becomes three characters, a digit or a ligature a few
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class TextCodec:
    """One model's tokenizer and chat template.

    eos_ids: every token id that ends a path.
    """

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids

    @classmethod
    def load(cls, folder: Path, chat_template: str | None = None) -> TextCodec:
        """Read the tokenizer of a checkpoint folder.

        chat_template: a Jinja template, or the path of a file that holds one.

        Raises:
            InputError: if the tokenizer or the template cannot be read.
        """
        own = None if chat_template is None else _template_text(chat_template)
        tokenizer = read_tokenizer(folder, own)
        check_template(tokenizer.chat_template, f"model {folder}")
        if (growth := _growth(tokenizer)) > _MOST_GROWTH:
            line = f"its normalizer makes {growth} characters of one"
            raise InputError(f"model {folder}: its tokenizer cannot be used ({line})")
        ids = {tokenizer.eos_token_id} | read_eos_ids(folder)
        return cls(tokenizer, frozenset(i for i in ids if i is not None))

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return len(self.tokenizer)

    @property
    def takes_instructions(self) -> bool:
        """True if the chat template shows an instruction as something else than a problem.

        One that writes both alike is of a model that only goes on with a text.
        """
        if self.tokenizer.chat_template is None:
            return False
        problem, texts = {"role": "user", "content": "?"}, []
        for role in ("system", "user"):
            try:
                texts.append(self.chat([{"role": role, "content": PLACE}, problem]))
            except InputError:  # there is no such role, or it minds who speaks after whom
                return True
        return texts[0] != texts[1]

    @cached_property
    def has_system_role(self) -> bool:
        """True if the chat template shows a system message."""
        messages = [{"role": "system", "content": PLACE}, {"role": "user", "content": "?"}]
        try:
            return PLACE in self.chat(messages, add_generation_prompt=True)
        except InputError:
            return False

    def render(self, problem: str, system_prompt: str | None = None) -> list[int]:
        """Token ids of the prompt: the chat template, or the plain text where there is none.

        system_prompt: in a message of its own, or before the problem where there is no such role;
        an empty one is none.
        """
        said = [{"role": "user", "content": problem}]
        return self.encode_prompt(self.conversation(said, system_prompt))

    @cached_property
    def takes_tools(self) -> bool:
        """True if the chat template shows functions that may be called."""
        template = self.tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else [template]
        return any(isinstance(text, str) and "tools" in text for text in texts)

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        system_prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A conversation as text for `encode_prompt`, up to where its reply begins.

        system_prompt: where nobody has said anything as the system or the developer.

        Raises:
            InputError: if the chat template fails, or there are tools that it does not show.
        """
        found = [{**each, "role": _ROLES.get(each["role"], each["role"])} for each in messages]
        if system_prompt and not any(each["role"] == "system" for each in found):
            found.insert(0, {"role": "system", "content": system_prompt})
        if tools and not self.takes_tools:
            raise InputError("tools: the model's chat template shows none")
        if self.tokenizer.chat_template is None:
            return "".join(f"{each['content']}\n\n" for each in found)
        if not self.has_system_role:
            found = _without_system(found)
        return self.chat(found, add_generation_prompt=True, tools=tools)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt's text; a chat template has put its special tokens into it."""
        if self.tokenizer.chat_template is not None:
            return self.encode(text)
        ids: list[int] = self._encode(text)["input_ids"]
        return ids

    def render_turn(self, text: str) -> list[int]:
        """Token ids from the end of an assistant's reply, through a user's turn, to the next reply.

        Raises:
            InputError: if there is no chat template, or it does not show a reply as it is.
        """
        if self.tokenizer.chat_template is None:
            raise InputError("asking a model again needs a chat template (--chat-template)")
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": PLACE},
            {"role": "user", "content": text},
        ]
        _, found, after = self.chat(messages, add_generation_prompt=True).rpartition(PLACE)
        if not found:
            raise InputError("chat template: it leaves out what the assistant has said")
        return self.encode(after)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        name: str | None = None,
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A conversation as text, special tokens included. name: what an error names.

        Raises:
            InputError: if the chat template fails.
        """
        make = partial(
            self.tokenizer.apply_chat_template,
            [dict(each) for each in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **({"tools": [dict(each) for each in tools]} if tools else {}),
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
        ids: list[int] = self._encode(text, add_special_tokens=False)["input_ids"]
        return ids

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
        """Token ids and character spans of each text (which holds its special tokens)."""
        coded = self._encode(list(texts), add_special_tokens=False, return_offsets_mapping=True)
        return coded["input_ids"], coded["offset_mapping"]

    def _encode(self, text: str | list[str], **options: bool) -> Any:
        try:
            return self.tokenizer(text, verbose=False, **options)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise InputError(f"the model's tokenizer: {line_of(error)}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a path's tokens, special tokens left out."""
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included as their text."""
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def token_bytes(self) -> list[bytes]:
        """What each token id adds to the text, as bytes; special tokens add nothing."""
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        tokenizer = self.tokenizer
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        added = tokenizer.added_tokens_decoder
        table = _byte_level_table() if _is_byte_level(tokenizer) else None
        found: list[bytes] = []
        for index, piece in enumerate(pieces):
            if index in added:
                special = added[index].special
                found.append(b"" if special else added[index].content.encode())
            elif piece is None:
                found.append(b"")
            elif table is not None:
                found.append(bytes(table[char] for char in piece if char in table))
            else:
                found.append(_piece_bytes(piece))
        return found


def token_pieces(codec: TextCodec, token_ids: Sequence[int]) -> list[bytes]:
    """What each of these tokens adds to their text, as bytes; special tokens add nothing.

    Put together they are the bytes of `codec.decode(token_ids)`, except that where a character is
    not whole (or bytes are none) the text has U+FFFD, and that SentencePiece's tokenizers leave out
    the blank before a text.
    """
    pieces = codec.token_bytes()
    return [pieces[token] for token in token_ids]


_ROLES = {"developer": "system"}


def _without_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For a template without that role: its texts go before what the user says next."""
    found: list[dict[str, Any]] = []
    waiting: list[str] = []
    for each in messages:
        if each["role"] == "system":
            waiting.append(str(each["content"]))
            continue
        added = dict(each)
        if waiting and each["role"] == "user":
            added["content"] = "\n\n".join([*waiting, str(each["content"])])
            waiting = []
        found.append(added)
    if waiting:
        found.append({"role": "user", "content": "\n\n".join(waiting)})
    return found


def _template_text(chat_template: str) -> str:
    path = Path(chat_template)
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8-sig")
    except OSError:
        pass  # a long literal template is no file name
    if "{" not in chat_template:
        raise InputError(f"--chat-template {chat_template!r}: no such file, and not a template")
    return chat_template


def _growth(tokenizer: Any) -> int:
    """How many characters the normalizer's replacements make of one, at the most."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    written = {} if normalizer is None else json.loads(normalizer.__getstate__())
    growth, waiting = 1, [written]
    while waiting:
        each = waiting.pop()
        waiting += each.get("normalizers", [])
        replaced = each.get("pattern", {}).get("String") or "?"
        growth *= max(1, len(each.get("content", "")) // len(replaced))
    return growth


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    # Its JSON; that of the whole tokenizer has the vocabulary in it.
    return b'"ByteLevel"' in backend.decoder.__getstate__()


def _byte_level_table() -> dict[str, int]:
    """GPT-2's alphabet: which character stands for which byte.

    A printable byte of Latin-1 is its own character; the others are numbered from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in sorted(printable)}
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}


def _piece_bytes(piece: str) -> bytes:
    match = _BYTE_TOKEN.match(piece)
    if match:
        return bytes([int(match[1], 16)])
    return piece.replace("\u2581", " ").encode()

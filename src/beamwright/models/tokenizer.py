"""`TextCodec` converts text to token ids and back, and renders chat templates.

It is a thin layer over the library `tokenizers`; `token_files` reads the files. A prompt is
rendered once. After that, the engine works with token ids only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from beamwright.errors import InputError, error_line
from beamwright.models.hf_config import read_eos_ids
from beamwright.models.template import (
    CLOCK,
    argument_names,
    check_template,
    parse_tool_arguments,
    render_with_limits,
    shows_text,
    template_writer,
)
from beamwright.models.thinking import ThoughtMarks, template_switch
from beamwright.models.token_files import check_tokenizer, is_panic, read_token_files

# A character that no template changes. It stands for an unknown text in a conversation.
PLACEHOLDER = "\ue000"
_PIECE = 1 << 16  # characters that `count_tokens` tokenises at once
_LEFT_OUT = "the chat template omits"
_ANOTHER = "pass --chat-template FILE with a template that shows it"
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class TextCodec:
    """One model's tokenizer and chat template.

    eos_ids: the ids of the tokens that end a reply.
    special_tokens: texts of special tokens by role, such as `bos_token`.
    chat_template: a template, several by name, or None.
    template_args: further arguments of the template, by name.
    remarks: warnings about the tokenizer for the user, one line each.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int] = frozenset(),
        special_tokens: Mapping[str, str] = MappingProxyType({}),
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        self.template_args: Mapping[str, Any] = {}
        self.tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Id of the token that begins every prompt, even if the template does not write the token.
        self.first_id: int | None = None
        self.chat_template = chat_template
        self.remarks: tuple[str, ...] = ()
        self._write = template_writer(chat_template or {}, special_tokens)
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
            InputError: if the tokenizer or the template cannot be read, or if the tokenizer would
                run the folder's own code.
        """
        where, files = f"model {folder}", read_token_files(folder)
        template = files.chat_template if chat_template is None else _template_text(chat_template)
        check_template(template, where)
        ends = files.ends | read_eos_ids(folder)
        codec = cls(files.tokenizer, ends, files.special_tokens, template)
        codec.first_id = codec.bos_id if files.adds_bos else None
        last = (files.tokenizer.id_to_token(index) for index in codec.eos_ids)
        needed = [str(template), files.special_tokens.get("bos_token", ""), *filter(None, last)]
        codec.remarks += *files.remarks, *check_tokenizer(files.tokenizer, where, needed)
        if template is None:
            codec.remarks += (f"{where}: no chat template: prompts are plain text",)
        codec.template_args = template_args
        return codec

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including added tokens."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which `decode` leaves out."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def thoughts(self) -> ThoughtMarks | None:
        """The marks that begin and end a thought; None if the model has none."""
        return ThoughtMarks.of(self.tokenizer, self.encode, self.token_bytes)

    @property
    def takes_instructions(self) -> bool:
        """True if the chat template distinguishes roles, as those of instruction-tuned models do.

        False without a template, or if the template renders a system message like a user's.
        """
        if self.chat_template is None:
            return False
        problem = {"role": "user", "content": "?"}
        said = ({"role": role, "content": PLACEHOLDER} for role in ("system", "user"))
        try:
            return len({self.apply_chat_template([turn, problem]) for turn in said}) > 1
        except InputError:  # the template refuses a role or the order of roles
            return True

    @cached_property
    def reads_time(self) -> bool:
        """True if the chat template reads the current time."""
        return CLOCK in argument_names(self.chat_template)

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the chat template shows a message's text only in a list of content parts.

        Templates for images require such lists.
        """
        said = {"role": "user", "content": PLACEHOLDER}
        for turn, is_shown in ((said, True), (_in_parts(said), False)):
            with suppress(InputError):
                if PLACEHOLDER in self._render_messages([turn], "", add_generation_prompt=True):
                    return not is_shown
        return False

    @cached_property
    def has_system_role(self) -> bool:
        """True if the chat template shows a system message."""
        messages = [{"role": "system", "content": PLACEHOLDER}, {"role": "user", "content": "?"}]
        try:
            return PLACEHOLDER in self.apply_chat_template(messages, add_generation_prompt=True)
        except InputError:
            return False

    def thinking_args(self, thinking: str | int) -> dict[str, Any]:
        """Return template arguments for `--thinking`, without those that `template_args` sets."""
        names = argument_names(self.chat_template) - self.template_args.keys()
        return {} if thinking == "auto" else template_switch(names, thinking)

    def encode_problem(
        self,
        problem: str,
        system_prompt: str | None = None,
        template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Return the token ids of the prompt for a problem.

        Without a chat template the prompt is plain text.

        system_prompt: a system message, which is placed before the problem's text if the template
            has no system role. None or empty: no system prompt.
        template_args: arguments that override those of the codec.
        """
        said = [{"role": "user", "content": problem}]
        return self.encode_prompt(self.render_conversation(said, system_prompt, (), template_args))

    def opens_thought(self, template_args: Mapping[str, Any]) -> bool:
        """Return whether the chat template itself begins the thought of a reply."""
        if self.chat_template is None or self.thoughts is None:
            return False
        said = [{"role": "user", "content": PLACEHOLDER}]
        text = self.apply_chat_template(said, add_generation_prompt=True, given=template_args)
        return self.thoughts.ends_with_start(self.encode(text))

    @cached_property
    def takes_tools(self) -> bool:
        """True if the chat template shows the tools that a model may call."""
        return "tools" in argument_names(self.chat_template)

    def unread_args(self, template_args: Mapping[str, Any]) -> list[str]:
        """Return the names in `template_args` that the chat template does not read."""
        return sorted(template_args.keys() - argument_names(self.chat_template))

    def render_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        system_prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render a conversation for `encode_prompt`, up to the beginning of the next reply.

        system_prompt: used if no message has the role system or developer.
        template_args: arguments that override those of the codec.

        Raises:
            InputError: if the chat template fails, leaves out the last user message, or cannot show
                the tools.
        """
        turns = [dict(message) for message in messages]
        for turn in turns:
            if turn["role"] == "developer":
                turn["role"] = "system"
        if system_prompt and not any(turn["role"] == "system" for turn in turns):
            turns.insert(0, {"role": "system", "content": system_prompt})
        if tools and not self.takes_tools:
            raise InputError("tools: the model's chat template does not support tools")
        if self.chat_template is None:
            return "".join(f"{turn['content']}\n\n" for turn in turns)
        if not self.has_system_role:
            turns = _without_system(turns)
        given = {**template_args, **({"tools": [*map(dict, tools)]} if tools else {})}
        try:
            text = self.apply_chat_template(turns, add_generation_prompt=True, given=given)
        except InputError:
            if turns == (changed := parse_tool_arguments(turns)):
                raise
            text = self.apply_chat_template(changed, add_generation_prompt=True, given=given)
        asked = [str(turn["content"]) for turn in messages if turn["role"] == "user"]
        if asked and not shows_text(asked[-1], text):
            raise InputError(f"{_LEFT_OUT} the problem: {_ANOTHER}")
        return text

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt.

        A chat template has written the special tokens; without a template the tokenizer adds them.
        If `first_id` is set, the ids begin with it.
        """
        plain = self.chat_template is None
        ids = list(self._encode([text], add_special_tokens=plain)[0].ids)
        first = [] if self.first_id is None else [self.first_id]
        return ids if ids[: len(first)] == first else first + ids

    def render_turn(
        self, text: str, template_args: Mapping[str, Any] = MappingProxyType({})
    ) -> list[int]:
        """Return the token ids that continue a conversation after the assistant's reply.

        The ids contain the user's next message, `text`, and end where the next reply begins.
        template_args: arguments that override those of the codec.

        Raises:
            InputError: if there is no chat template, or it changes the reply or omits a turn.
        """
        if self.chat_template is None:
            raise InputError("a follow-up question needs a chat template; pass --chat-template")
        users = [{"role": "user", "content": said} for said in ("?", text)]
        reply = {"role": "assistant", "content": PLACEHOLDER}
        messages = [users[0], reply, users[1]]
        said = self.apply_chat_template(messages, add_generation_prompt=True, given=template_args)
        _, place, after = said.rpartition(PLACEHOLDER)
        if not (place and shows_text(text, after)):
            left = "the last user turn" if place else "the assistant's turns"
            raise InputError(f"{_LEFT_OUT} {left}: {_ANOTHER}")
        return self.encode(after)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        name: str | None = None,
        *,
        add_generation_prompt: bool = False,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render a conversation to text, including special tokens.

        name: the model's name in error messages; None for "the model".
        given: template arguments by name, which override those of the codec.

        Raises:
            InputError: if the chat template fails.
        """
        if self.chat_template is None:
            raise InputError(
                f"{name} has no chat template"
                if name
                else "the model has no chat template; pass one with --chat-template"
            )
        turns = [*map(_in_parts, messages)] if self._takes_parts else messages
        added = {"add_generation_prompt": add_generation_prompt, **self.template_args, **given}
        return self._render_messages(turns, f"{name}: " if name else "", **added)

    def _render_messages(
        self, messages: Sequence[Mapping[str, Any]], where: str, **given: Any
    ) -> str:
        turns = [{key: v for key, v in turn.items() if v is not None} for turn in messages]
        return render_with_limits(partial(self._write, turns, **given), where)

    def count_tokens(self, text: str, most: int) -> int:
        """Return the number of tokens of a text; stop counting once it exceeds `most`.

        For a text of more than 65,536 characters the number is an estimate.
        """
        count = 0
        for start in range(0, len(text), _PIECE):
            if count > most:
                break
            # A cut between pieces usually splits a token, which adds one. Subtract that token.
            # A cut may also add none or several, so the number is an estimate.
            count += len(self.encode(text[start : start + _PIECE])) - (start > 0)
        return count

    def encode(self, text: str) -> list[int]:
        """Return the token ids of text that already contains its special tokens."""
        return list(self._encode([text])[0].ids)

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
        """Return the token ids and the tokens' character spans of each text.

        The texts already contain their special tokens.
        """
        coded = self._encode(texts)
        return [text.ids for text in coded], [text.offsets for text in coded]

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[Any]:
        try:
            coded: list[Any] = self.tokenizer.encode_batch(
                list(texts), add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            if not is_panic(error):
                raise
            raise InputError(f"the model's tokenizer failed: {error_line(error)}") from error
        return coded

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a path's tokens without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a reply's tokens, without marks such as <think>."""
        marks = self.thoughts
        return self.decode(token_ids if marks is None else marks.without_marks(token_ids))

    def extend_reply(self, text: str, token_ids: Sequence[int]) -> str | None:
        """Extend a reply's text by more tokens, for streaming. Return the whole text so far.

        None: the caller must decode all of the reply's tokens again. A text can be extended only if
        the decoder is byte-level, the model does not think, and no character is incomplete.

        text: the reply's text so far. token_ids: the appended tokens.
        """
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}")
        joins = whole and self.thoughts is None and isinstance(self.tokenizer.decoder, ByteLevel)
        return text + self.decode(token_ids) if joins else None

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with the texts of special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token, by id; b"" for special tokens.

        The joined bytes of a path's tokens equal the text of `decode`, with two exceptions. Where
        bytes are not valid UTF-8, for example half a character, the text has U+FFFD. SentencePiece
        tokenizers leave out the blank before a text.
        """
        added = self.tokenizer.get_added_tokens_decoder()
        # Read the decoder's JSON: the JSON of the whole tokenizer contains the vocabulary.
        decoder = self.tokenizer.decoder
        is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        table = _to_latin1() if is_byte_level else None
        pieces: list[bytes] = []
        for index in range(self.vocab_size):
            piece = self.tokenizer.id_to_token(index) or ""
            if index in added:
                pieces.append(b"" if added[index].special else added[index].content.encode())
            elif table is not None:
                pieces.append(piece.translate(table).encode("latin-1", "ignore"))
            elif match := _BYTE_TOKEN.match(piece):
                pieces.append(bytes([int(match[1], 16)]))
            else:
                pieces.append(piece.replace("\u2581", " ").encode())
        return pieces


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message whose content is a list with its text as the only part."""
    text = message.get("content")
    parts = [{"type": "text", "text": text}] if isinstance(text, str) else text
    return {**message, "content": parts}


def _without_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without the role system, for a template that does not have it.

    The text of a system message is placed before the text of the next user message.
    """
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
        pass  # a long literal template is no valid file name
    if "{" not in chat_template:
        raise InputError(f"--chat-template {chat_template!r}: neither a file nor a template")
    return chat_template


def _to_latin1() -> dict[int, str | None]:
    """Return a table for `str.translate` that turns token texts of byte-level BPE into bytes.

    In these texts (GPT-2's alphabet) each character stands for a byte: a printable byte for itself,
    the other bytes for the characters from number 256 on. The result is in Latin-1. None removes a
    character that stands for no byte.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {**dict.fromkeys(others)} | {256 + at: chr(byte) for at, byte in enumerate(others)}

"""Problems that are not a plain text: a chat conversation, or a raw prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from beamwright.units import parse_template_args


@dataclass(frozen=True)
class Conversation:
    """A chat conversation as a problem; the search answers its last message."""

    # The messages in the format of chat templates: each has a `role` (system, developer, user,
    # assistant or tool) and a `content`, a text. An assistant message may have `tool_calls`, and a
    # tool message may have a `tool_call_id`.
    messages: tuple[Mapping[str, Any], ...]
    # JSON schemas of the functions that the answer may call.
    tools: tuple[Mapping[str, Any], ...] = ()
    # Arguments of the chat template by name; they override the arguments from the settings.
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the template arguments.

        Raises:
            InputError: if `template_args` are not valid arguments of a chat template.
        """
        parse_template_args(self.template_args)

    @property
    def problem_text(self) -> str:
        """The text that a verifier reads as the problem.

        System and developer messages are left out. A single remaining message is returned without
        its role; several are joined as "role: content".
        """
        shown = [each for each in self.messages if each["role"] not in ("system", "developer")]
        if len(shown) == 1:
            return str(shown[0]["content"]).strip()
        return "\n\n".join(f"{each['role']}: {each['content']}".strip() for each in shown)


@dataclass(frozen=True)
class RawPrompt:
    """A problem that the model continues as it is, a text or token ids, without a chat template."""

    given: str | tuple[int, ...]


Problem = str | Conversation | RawPrompt

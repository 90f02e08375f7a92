"""What a problem can be beside a text: a conversation, or a prompt that is given as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from beamwright.units import parse_template_args


@dataclass(frozen=True)
class Conversation:
    """Messages, the last of which is answered.

    messages: as chat templates take them: `role` (system, developer, user, assistant, tool) and
    `content`, a text; an assistant's may have `tool_calls`, a tool's a `tool_call_id`.
    tools: functions that the answer may call, as JSON schemas. template_args: arguments of the chat
    template by name, before those of the settings.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InputError for arguments that cannot be some."""
        parse_template_args(self.template_args)

    @property
    def problem_text(self) -> str:
        """What a verifier reads as the problem: who said what, or the only message of the user."""
        said = [each for each in self.messages if each["role"] not in ("system", "developer")]
        if len(said) == 1:
            return str(said[0]["content"]).strip()
        return "\n\n".join(f"{each['role']}: {each['content']}".strip() for each in said)


@dataclass(frozen=True)
class RawPrompt:
    """A text, or token ids, that the model goes on with: no chat template, nothing added."""

    given: str | tuple[int, ...]


Problem = str | Conversation | RawPrompt

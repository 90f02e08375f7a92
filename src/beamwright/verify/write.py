"""A path as text in a verifier's format: parts, the last step's place, and its markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beamwright.errors import InputError
from beamwright.models import TextCodec
from beamwright.models.tokenizer import PLACE
from beamwright.tree import Node
from beamwright.verify.spec import VerifierSpec

Bounds = tuple[int, int]


@dataclass(frozen=True)
class PathText:
    """A path's text.

    parts: it in pieces, which joint formats put together before they encode. step: characters of
    the last step's own text. marks: characters of the markers to read. complete: the end of the
    text may be read.
    """

    parts: tuple[str, ...]
    step: Bounds
    marks: tuple[Bounds, ...] = ()
    complete: bool = False


class PathWriter:
    """Writes paths by `spec.template`. Steps that are empty leave no trace in the text.

    Raises:
        InputError: if the format needs a chat template and the checkpoint has none.
    """

    def __init__(self, spec: VerifierSpec, codec: TextCodec) -> None:
        self._spec, self._template, self._codec = spec, spec.template, codec
        needs_chat = self._template.layout != "text" or self._template.system is not None
        if needs_chat and codec.tokenizer.chat_template is None:
            raise InputError(f"verifier format {spec.name}: its checkpoint has no chat template")

    def prefix(self, problem: str) -> str:
        """The text before the first step."""
        template = self._template
        if template.layout == "dialogue":
            return self._dialogue(problem, [PLACE]).rpartition(PLACE)[0]
        if template.layout == "answer":
            return self._answer(problem, PLACE).rpartition(PLACE)[0]
        if template.prefix is not None:
            return template.prefix.replace("{problem}", problem)
        return self._codec.decode_raw(self._codec.render(problem, template.system))

    def write(self, problem: str, nodes: Sequence[Node]) -> list[PathText]:
        """The paths that end in these nodes."""
        if self._template.layout == "dialogue":
            return [self._write_dialogue(problem, node) for node in nodes]
        if self._template.layout == "answer":
            return [self._write_answer(problem, node) for node in nodes]
        prefix = self.prefix(problem)
        return [self._write_text(prefix, node) for node in nodes]

    def _write_text(self, prefix: str, node: Node) -> PathText:
        suffix, marker = self._template.step_suffix, self._template.marker or ""
        parts, length = [prefix], len(prefix)
        step: Bounds = (length, length)
        marks: list[Bounds] = []
        for each in node.reply():
            step, marks = (length, length), []
            for piece in self._pieces(each.step_text):
                step = (step[0], length + len(piece))
                at = step[1] + suffix.index(marker)
                marks.append((at, at + len(marker)))
                parts += [piece, suffix] if suffix else [piece]
                length += len(piece) + len(suffix)
        return PathText(tuple(parts), step, tuple(marks), self._ends(node))

    def _write_dialogue(self, problem: str, node: Node) -> PathText:
        steps = [self._own(each.step_text) for each in node.reply()]
        if not any(steps):
            return PathText((self.prefix(problem),), (0, 0))
        text = self._dialogue(problem, [step for step in steps if step])
        marker = self._template.marker or ""
        at = text.rfind(marker)
        marks = ((at, at + len(marker)),) if steps[-1] else ()
        return PathText((text,), (0, 0), marks)

    def _write_answer(self, problem: str, node: Node) -> PathText:
        answer = self._own("".join(each.step_text for each in node.reply()))
        return PathText((self._answer(problem, answer),), (0, 0), (), self._ends(node))

    def _ends(self, node: Node) -> bool:
        """True if the end of this path's text is its score."""
        if self._spec.scores == "ended_paths":
            # The last step may be empty where the one before it was the answer.
            return any(self._own(each.step_text) for each in node.reply())
        return bool(self._own(node.step_text))

    def _own(self, text: str) -> str:
        """A step's text without what only delimits it."""
        return text.lstrip("\n").rstrip() if self._template.strip else text

    def _pieces(self, text: str) -> list[str]:
        own, split = self._own(text), self._template.split
        if split is None:
            return [own] if own else []
        return [piece for piece in own.split(split) if piece.strip()]

    def _dialogue(self, problem: str, steps: Sequence[str]) -> str:
        turns: list[dict[str, str]] = []
        for number, step in enumerate(steps):
            content = step if number else f"{problem} {step}"
            turns.append({"role": "user", "content": content})
            turns.append({"role": "assistant", "content": self._template.marker or ""})
        return self._render(turns)

    def _answer(self, problem: str, answer: str) -> str:
        turns = [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]
        return self._render(turns)

    def _render(self, turns: list[dict[str, str]]) -> str:
        if self._template.system is not None:
            turns = [{"role": "system", "content": self._template.system}, *turns]
        return self._codec.chat(turns, f"verifier format {self._spec.name}")

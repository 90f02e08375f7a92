"""A path as the verifier reads it: its own text, its own tokens, and where to look.

Knows the declared format (`spec.Template`), no KV and no scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beamwright.errors import InputError
from beamwright.models.tokenizer import PLACE, TextCodec
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
        if needs_chat and codec.chat_template is None:
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
        for node_step in node.reply():
            step, marks = (length, length), []
            for piece in self._pieces(node_step.step_text):
                step = (step[0], length + len(piece))
                at = step[1] + suffix.index(marker)
                marks.append((at, at + len(marker)))
                parts += [piece, suffix] if suffix else [piece]
                length += len(piece) + len(suffix)
        return PathText(tuple(parts), step, tuple(marks), self._ends(node))

    def _write_dialogue(self, problem: str, node: Node) -> PathText:
        steps = [self._stripped(part.step_text) for part in node.reply()]
        if not any(steps):
            return PathText((self.prefix(problem),), (0, 0))
        text = self._dialogue(problem, [step for step in steps if step])
        marker = self._template.marker or ""
        at = text.rfind(marker)
        marks = ((at, at + len(marker)),) if steps[-1] else ()
        return PathText((text,), (0, 0), marks)

    def _write_answer(self, problem: str, node: Node) -> PathText:
        answer = self._stripped("".join(part.step_text for part in node.reply()))
        return PathText((self._answer(problem, answer),), (0, 0), (), self._ends(node))

    def _ends(self, node: Node) -> bool:
        """True if the end of this path's text is its score."""
        if self._spec.scores == "ended_paths":
            # The last step may be empty where the one before it was the answer.
            return any(self._stripped(part.step_text) for part in node.reply())
        return bool(self._stripped(node.step_text))

    def _stripped(self, text: str) -> str:
        """A step's text without what only delimits it."""
        return text.lstrip("\n").rstrip() if self._template.strip else text

    def _pieces(self, text: str) -> list[str]:
        text, split = self._stripped(text), self._template.split
        if split is None:
            return [text] if text else []
        return [piece for piece in text.split(split) if piece.strip()]

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


@dataclass(frozen=True)
class Encoded:
    """A path's encoding.

    token_ids: of the whole path; read_at: indices of the tokens that score its last step.
    """

    token_ids: list[int]
    read_at: list[int]


@dataclass(frozen=True)
class Traced:
    """An encoding with where it comes from.

    text: of the whole path; spans: each token's characters in it; marks: characters of the markers
    that are read.
    """

    encoded: Encoded
    text: str
    spans: list[Bounds]
    marks: tuple[Bounds, ...]


class PathEncoder:
    """Encodes paths in a verifier's format.

    Text is encoded whole (`joint`), so a step's first tokens may merge with the one before, or
    part by part; either way, what a step changes is found by comparing tokens with the parent's
    (`common_prefix`).

    Raises:
        InputError: if the format needs a chat template and the checkpoint has none.
    """

    def __init__(self, spec: VerifierSpec, codec: TextCodec) -> None:
        self._spec, self._codec = spec, codec
        self._writer = PathWriter(spec, codec)
        bos = codec.bos_id if spec.template.bos else None
        self._first: list[int] = [] if bos is None else [bos]

    def encode_prefix(self, problem: str) -> list[int]:
        """Token ids of the text before the first step."""
        return [*self._first, *self._codec.encode(self._writer.prefix(problem))]

    def encode(self, problem: str, nodes: Sequence[Node]) -> list[Encoded]:
        """Encode the paths that end in these nodes."""
        return [path.encoded for path in self.trace(problem, nodes)]

    def trace(self, problem: str, nodes: Sequence[Node]) -> list[Traced]:
        """The same, with the text and each token's place in it."""
        written = self._writer.write(problem, nodes)
        ids, spans = self._encode_parts([path.parts for path in written])
        found: list[Traced] = []
        for node, path, own_ids, own_spans in zip(nodes, written, ids, spans, strict=True):
            wanted = self._spec.scores == "every_step" or node.ended
            shifted = [(0, 0)] * len(self._first) + list(own_spans)
            read_at = self._read_at(shifted, path) if wanted else []
            encoded = Encoded([*self._first, *own_ids], read_at)
            found.append(Traced(encoded, "".join(path.parts), shifted, path.marks))
        return found

    def _encode_parts(
        self, paths: Sequence[Sequence[str]]
    ) -> tuple[list[list[int]], list[list[Bounds]]]:
        """Token ids and character spans of each path."""
        if self._spec.template.joint:
            return self._codec.encode_with_offsets(["".join(parts) for parts in paths])
        unique = list(dict.fromkeys(part for parts in paths for part in parts))
        coded_ids, coded_spans = self._codec.encode_with_offsets(unique)
        coded = dict(zip(unique, zip(coded_ids, coded_spans, strict=True), strict=True))
        all_ids: list[list[int]] = []
        all_spans: list[list[Bounds]] = []
        for parts in paths:
            ids: list[int] = []
            spans: list[Bounds] = []
            start = 0
            for part in parts:
                ids.extend(coded[part][0])
                spans.extend((start + a, start + b) for a, b in coded[part][1])
                start += len(part)
            all_ids.append(ids)
            all_spans.append(spans)
        return all_ids, all_spans

    def _read_at(self, spans: list[Bounds], path: PathText) -> list[int]:
        """Indices of the tokens to read for the path's last step."""
        read, (begin, end) = self._spec.read, path.step
        if read in ("marker", "before_marker"):
            return self._at_marks(spans, path.marks)
        if read == "end":
            return [len(spans) - 1] if path.complete else []
        first = 1 if self._spec.head.looks_back else 0  # nothing precedes the first token
        numbered = list(enumerate(spans))[first:]
        inside = [i for i, (a, b) in numbered if b > begin and a < end and b > a]
        return inside if read == "every_token" else inside[-1:]

    def _at_marks(self, spans: list[Bounds], marks: Sequence[Bounds]) -> list[int]:
        """The token that completes each marker, or the one before the marker's first."""
        found: list[int] = []
        for begin, end in marks:
            if self._spec.read == "marker":
                found.extend([i for i, (a, b) in enumerate(spans) if a < end <= b][-1:])
            else:
                found.extend([i - 1 for i, (a, b) in enumerate(spans) if a <= begin < b and i][:1])
        return found


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common token prefix."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count

"""A path as the verifier reads it: its own text, its own tokens, and where to look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beamwright.models import TextCodec
from beamwright.tree import Node
from beamwright.verify.spec import VerifierSpec


@dataclass(frozen=True)
class Encoded:
    """A path's encoding.

    token_ids: of the whole path; read_at: indices of the tokens that score its last step.
    """

    token_ids: list[int]
    read_at: list[int]


class PathEncoder:
    """Writes paths in a verifier's format.

    Text is encoded whole, so a step's first tokens may merge with the one before; what that
    changes is found by comparing tokens with the parent's (`common_prefix`).
    """

    def __init__(self, spec: VerifierSpec, codec: TextCodec) -> None:
        self._spec, self._codec = spec, codec

    def prefix(self, problem: str) -> str:
        """The text before the first step."""
        written = self._spec.template.prefix
        if written is not None:
            return written.replace("{problem}", problem)
        return self._codec.decode_raw(self._codec.render(problem))

    def encode_prefix(self, problem: str) -> list[int]:
        """Token ids of the text before the first step."""
        return self._codec.encode(self.prefix(problem))

    def encode(self, problem: str, nodes: Sequence[Node]) -> list[Encoded]:
        """Encode the paths that end in these nodes."""
        prefix, suffix = self.prefix(problem), self._spec.template.step_suffix
        texts: list[str] = []
        spans: list[tuple[int, int]] = []
        for node in nodes:
            text = prefix
            begin = end = len(text)
            for step in node.path()[1:]:
                begin, end = len(text), len(text) + len(step.step_text)
                text += step.step_text + suffix
            texts.append(text)
            spans.append((begin, end))
        ids, offsets = self._codec.encode_with_offsets(texts)
        return [
            Encoded(list(i), self._read_at(o, *span))
            for i, o, span in zip(ids, offsets, spans, strict=True)
        ]

    def _read_at(self, offsets: list[tuple[int, int]], begin: int, end: int) -> list[int]:
        """Tokens to read for the step whose text stands at [begin, end)."""
        first = 1 if self._spec.head.looks_back else 0  # nothing stands before the first token
        spans = list(enumerate(offsets))[first:]
        inside = [i for i, (a, b) in spans if b > begin and a < end and b > a]
        if not inside:
            return []
        if self._spec.read == "every_token":
            return inside
        if self._spec.read == "step_end":
            return inside[-1:]
        template = self._spec.template
        at = end + template.step_suffix.index(template.marker or "")
        found = [i for i, (a, b) in enumerate(offsets) if a <= at < b][:1]
        return found if self._spec.read == "marker" else [i - 1 for i in found]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common token prefix."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count

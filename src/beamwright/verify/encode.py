"""A path as the verifier reads it: its own text, its own tokens, and where to look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beamwright.models import TextCodec
from beamwright.tree import Node
from beamwright.verify.spec import VerifierSpec
from beamwright.verify.write import Bounds, PathText, PathWriter


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
        bos = codec.tokenizer.bos_token_id if spec.template.bos else None
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

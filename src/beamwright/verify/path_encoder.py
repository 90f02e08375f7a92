"""Encode a path for a verifier: its text, its tokens, and the positions at which scores are read.

The format is declared (`spec.Template`). This module handles neither KV nor scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from beamwright.errors import InputError
from beamwright.models.tokenizer import PLACEHOLDER, TextCodec
from beamwright.tree import Node
from beamwright.verify.spec import VerifierSpec

Bounds = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """A path's tokens in a verifier's format, and the tokens at which the head is read."""

    token_ids: list[int]  # token ids of the whole path
    # Indices of the tokens to read: of the last step, and of steps before it without a score.
    read_at: list[int]
    sizes: list[int]  # per step, the number of its tokens in `read_at`; no entry for 0 tokens


# A path's text as (parts, ranges).
#
# parts: the text in pieces. A joint format encodes them as one text, other formats one by one.
# ranges: for each step whose score is read, the character ranges (begin, end) in the whole text at
# which it is read: those of the step's markers, or that of the step itself. For a format that reads
# the end of the text, the only range is the placeholder (0, 0).
_PathText = tuple[list[str], list[list[Bounds]]]


class PathEncoder:
    """Encodes paths in a verifier's format. Empty steps are left out of the text.

    A text is encoded as a whole (`joint`) or part by part. In a joint text, a token may span the
    end of a step, and a further step may change the last tokens of its parent's path. Callers
    therefore compare the tokens of both paths (`common_prefix`).

    Raises:
        InputError: if the format needs a chat template, and the checkpoint has none, or one that
            omits the problem or a step.
    """

    def __init__(self, spec: VerifierSpec, codec: TextCodec) -> None:
        self._spec, self._template, self._codec = spec, spec.template, codec
        self._at_marker = spec.read in ("marker", "before_marker")
        needs_chat = spec.template.layout != "text" or spec.template.system is not None
        if needs_chat and codec.chat_template is None:
            raise InputError(
                f"verifier format {spec.name}: its checkpoint has no chat template; use layout: "
                "text without system"
            )
        if spec.template.layout != "text":
            shown = self._turns(PLACEHOLDER, [PLACEHOLDER], None)
            if shown.count(PLACEHOLDER) < 2 or (spec.template.marker or "") not in shown:
                said = "the checkpoint's chat template omits the problem, a step or the marker"
                raise InputError(f"verifier format {spec.name}: {said}; use layout: text")
        bos = codec.bos_id if spec.template.bos else None
        self._first: list[int] = [] if bos is None else [bos]

    def encode_prefix(self, root: Node) -> list[int]:
        """Return the token ids of the text before the first step."""
        prefix = self._prefix(root.problem_text, root.now)
        return [*self._first, *self._codec.encode(prefix)]

    def encode(
        self,
        problem: str,
        nodes: Sequence[Node],
        scored: Callable[[Node], Node | None] = lambda node: node.parent,
    ) -> list[Encoded]:
        """Encode the paths that end in `nodes`.

        scored: function from a node to the nearest ancestor that was read before. The steps after
            this ancestor are read.
        """
        write, begins = self._write_turns, problem
        if self._template.layout == "text":
            begins = self._prefix(problem, nodes[0].root.now if nodes else None)
            write = self._write_text
        written = [write(begins, node, self._steps(node, after=scored(node))) for node in nodes]
        encoded = []
        coded = self._encode_parts([parts for parts, _ in written])
        for node, (_, steps), ids, places in zip(nodes, written, *coded, strict=True):
            judged = self._spec.scores == "every_step" or node.ended
            wanted = steps if judged and node.is_seen_by(self._spec.sees) else []
            spans = [(0, 0)] * len(self._first) + list(places)
            read_at = [at for step in wanted if (at := self._read_at(spans, step))]
            flat = [index for of_step in read_at for index in of_step]
            encoded.append(Encoded([*self._first, *ids], flat, list(map(len, read_at))))
        return encoded

    # --- text --------------------------------------------------------------------------------

    def _prefix(self, problem: str, now: str | None) -> str:
        """Return the text before the first step. now: the time that chat templates see."""
        template = self._template
        if template.layout != "text":
            return self._turns(problem, [PLACEHOLDER], now).rpartition(PLACEHOLDER)[0]
        if template.prefix is not None:
            return template.prefix.replace("{problem}", problem)
        return self._codec.decode_raw(
            self._codec.encode_problem(problem, template.system, {"now": now})
        )

    def _write_text(self, prefix: str, /, node: Node, unread: Sequence[Node]) -> _PathText:
        """Write a path in the layout "text": every step is followed by its suffix.

        unread: the steps to read.
        """
        suffix, marker, split = (
            self._template.step_suffix, self._template.marker or "", self._template.split
        )  # fmt: skip
        parts, length = [prefix], len(prefix)
        places: dict[Node, list[Bounds]] = {}
        for step in self._steps(node):
            begin = end = length
            marks: list[Bounds] = []
            text = self._stripped(step.step_text)
            for piece in [text] if split is None else text.split(split):
                if not (piece if split is None else piece.strip()):
                    continue
                end = length + len(piece)
                at = end + suffix.index(marker)
                marks.append((at, at + len(marker)))
                parts += [piece, suffix] if suffix else [piece]
                length += len(piece) + len(suffix)
            places[step] = marks if self._at_marker else [(begin, end)]
        if self._spec.read == "end":
            return parts, self._end_range(node)
        return parts, [places[each] for each in unread]

    def _write_turns(self, problem: str, /, node: Node, unread: Sequence[Node]) -> _PathText:
        """Write a path as chat turns: a dialogue of steps and markers, or the answer as one turn.

        unread: the steps to read, the last ones of the path.
        """
        steps, now = [self._stripped(part.step_text) for part in self._steps(node)], node.root.now
        if self._template.layout == "answer":
            answer = self._stripped("".join(part.step_text for part in self._steps(node)))
            return [self._turns(problem, [answer], now)], self._end_range(node)
        if not any(steps):
            return [self._prefix(problem, now)], []
        marker, read = self._template.marker or "", list[list[Bounds]]()
        for number in range(len(steps) - len(unread), len(steps)):
            if steps[number]:  # the whole dialogue begins with the dialogue up to this step
                so_far = self._turns(problem, list(filter(None, steps[: number + 1])), now)
                at = so_far.rfind(marker)
                read.append([(at, at + len(marker))])
        return [self._turns(problem, list(filter(None, steps)), now)], read

    def _turns(self, problem: str, texts: Sequence[str], now: str | None) -> str:
        """Return the chat in the checkpoint's template. texts: the steps, or one whole answer."""
        template = self._template
        turns: list[dict[str, str]] = []
        if template.system is not None:
            turns.append({"role": "system", "content": template.system})
        if template.layout == "answer":
            turns.append({"role": "user", "content": problem})
            turns.append({"role": "assistant", "content": texts[0]})
        for number, step in enumerate(texts if template.layout == "dialogue" else ()):
            content = step if number else f"{problem} {step}"
            turns.append({"role": "user", "content": content})
            turns.append({"role": "assistant", "content": template.marker or ""})
        where = f"verifier format {self._spec.name}"
        return self._codec.apply_chat_template(turns, where, given={"now": now})

    def _end_range(self, node: Node) -> list[list[Bounds]]:
        """Return a placeholder range, for a format that reads the end of a path's text.

        The list is empty if the path has no text to score.
        """
        # The last step of an ended path may be empty, because an earlier step stated the answer.
        steps = self._steps(node) if self._spec.scores == "ended_paths" else [node]
        return [[(0, 0)]] if any(self._stripped(step.step_text) for step in steps) else []

    def _steps(self, node: Node, after: Node | None = None) -> list[Node]:
        """Return the steps of the reply of `node` that the verifier's text contains.

        The verifier may see only thoughts or only answers (`spec.sees`).
        after: an ancestor; only steps after this node are returned.
        """
        first = 0 if after is None else after.depth + 1
        return [
            each
            for each in node.reply()
            if each.depth >= first and each.is_seen_by(self._spec.sees)
        ]

    def _stripped(self, text: str) -> str:
        """Return the text of a step, without surrounding delimiters if the format strips them."""
        return text.lstrip("\n").rstrip() if self._template.strip else text

    # --- tokens ------------------------------------------------------------------------------

    def _encode_parts(
        self, paths: Sequence[Sequence[str]]
    ) -> tuple[list[list[int]], list[list[Bounds]]]:
        """Return the token ids and the character spans of the tokens for each path.

        paths: the parts of each path's text.
        """
        if self._template.joint:
            return self._codec.encode_with_offsets(["".join(parts) for parts in paths])
        unique = list(dict.fromkeys(part for parts in paths for part in parts))
        pairs = zip(*self._codec.encode_with_offsets(unique), strict=True)
        coded = dict(zip(unique, pairs, strict=True))
        all_ids = [[token for part in parts for token in coded[part][0]] for parts in paths]
        all_spans: list[list[Bounds]] = []
        for parts in paths:
            begins = zip(parts, accumulate(map(len, parts), initial=0), strict=False)
            spans = [(begin + a, begin + b) for part, begin in begins for a, b in coded[part][1]]
            all_spans.append(spans)
        return all_ids, all_spans

    def _read_at(self, spans: list[Bounds], step: list[Bounds]) -> list[int]:
        """Return the indices of the tokens to read for one step.

        spans: the character span of each token of the path.
        step: the character ranges of the step (`_PathText`).
        """
        read = self._spec.read
        if read == "end":
            return [len(spans) - 1]
        if self._at_marker:
            # The token that completes each marker, or the token before the marker begins.
            found: list[int] = []
            for first, last in step:
                if read == "marker":
                    found += [i for i, (a, b) in enumerate(spans) if a < last <= b][-1:]
                else:
                    found += [i - 1 for i, (a, b) in enumerate(spans) if a <= first < b and i][:1]
            return found
        ((begin, end),) = step
        # A head that looks back cannot read the first token, which has no token before it.
        skipped = 1 if self._spec.head.looks_back else 0
        numbered = list(enumerate(spans))[skipped:]
        inside = [i for i, (a, b) in numbered if b > begin and a < end and b > a]
        return inside if read == "every_token" else inside[-1:]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))

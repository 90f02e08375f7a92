"""One reasoning step. Knows its tokens, parent and score; its KV handles are opaque here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

Lineage = tuple[str | int, ...]
Sees = Literal["answer", "thought", "both"]
# Ids and log-probabilities of the likeliest tokens in one's place, the likeliest first.
TopTokens = tuple[tuple[int, float], ...]


class StopReason(StrEnum):
    """Why a step ended. The last four end the whole path; of these the last two do not complete it.

    THOUGHT_END: a thought that was under way is over, and an answer may follow.
    """

    DELIMITER = "delimiter"
    STEP_LENGTH = "step_length"
    STEP_LIMIT = "step_limit"
    THOUGHT_END = "thought_end"
    EOS = "eos"
    STOP_STRING = "stop_string"
    PATH_LIMIT = "path_limit"
    CONTEXT_LIMIT = "context_limit"

    @cached_property
    def ends_path(self) -> bool:
        """True if the path cannot go on after such a step."""
        return self.completes or self in (StopReason.PATH_LIMIT, StopReason.CONTEXT_LIMIT)

    @property
    def completes(self) -> bool:
        """True if the reply ended by itself: it is a whole answer, and was not cut off."""
        return self in (StopReason.EOS, StopReason.STOP_STRING)


# The same of a stop reason that is but a text: of a candidate, or of a file; "probe" of older ones.
COMPLETE_STOPS = ("probe", *(str(stop) for stop in StopReason if stop.completes))


class NodeState(StrEnum):
    """What has become of a node."""

    OPEN = "open"  # its step is being decoded or waits for it
    CANDIDATE = "candidate"  # decoded; waits for its score and for selection
    KEPT = "kept"  # survived: it has, or will get, children
    FINISHED = "finished"  # its path has ended; it is a final candidate
    PRUNED = "pruned"


@dataclass(frozen=True)
class Turn:
    """What the user is made to say once a reply has ended.

    answers: the reply to it is an answer to the problem; otherwise it is about one (a review).
    """

    text: str
    answers: bool


@dataclass(eq=False)
class Node:
    """A step in the tree, or a turn between two replies.

    lineage: problem id, then child ordinals from the root.
    start: position of the first token in the path (the prompt counts).
    round: the round in which it was opened; the first is 1, the root's 0.
    stats: of the distribution that each token was drawn from, one value per token, by name; only
        what a verifier or strategy asks for (`protocols.ReadsTokenStats`).
    top: beside each token the likeliest ones of the same distribution as `logprobs`, the token
        itself where it is among them; only where `top_logprobs` asks for it.
    text: text of the whole reply, this step included: what follows the prompt, or the last turn.
        Before the stop string where one has ended it; the string may have begun in the parent,
        whose own text stays.
    thought: it belongs to a thought, to whose end or a part of it the step goes.
    step_score: the verifier's score of this step alone; score: aggregated over the path.
    handles: one opaque KV handle per owner, "generator" or "verifier".
    usage: tokens spent on this node: "overrun", "drafted", "draft_accepted",
        "generator_prefilled", "generator_reused", "verifier_prefilled", "verifier_reused",
        "verifier_generated"; "prompt_unread", of the path above it, by a generator elsewhere; and
        "judge_unparsed", critiques without a score.
    notes: what was written about this step, by kind ("critique").
    answer, vote: what its reply states, and one text for equal answers; of ended paths.
    problem_text: the problem as the verifier reads it (root only).
    now: the time that chat templates see (root only).
    raw: the prompt was given as it is, and its reply is one text, thoughts included (root only).
    quoted: the start of a thought at the prompt's end is the user's, not the template's (root
        only).
    root: the node that owns the prompt.
    greedy: its tokens are the likeliest, not drawn (a rollout).
    speculative: it hangs below its parent, but is no child yet: selection has not opened it.
    turn: of a node whose tokens are given, not generated: what they ask for.
    """

    lineage: Lineage
    parent: Node | None
    start: int
    state: NodeState = NodeState.OPEN
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    stats: dict[str, tuple[float, ...]] = field(default_factory=dict)
    top: tuple[TopTokens, ...] = ()
    text: str = ""
    stop: StopReason | None = None
    thought: bool = False
    step_score: float | None = None
    score: float | None = None
    children: list[Node] = field(default_factory=list)
    handles: dict[str, Any] = field(default_factory=dict)
    usage: Counter[str] = field(default_factory=Counter)
    notes: dict[str, str] = field(default_factory=dict)
    answer: str | None = None
    vote: str | None = None
    problem_text: str = ""
    now: str | None = None
    raw: bool = False
    quoted: bool = False
    greedy: bool = False
    round: int = 0
    turn: Turn | None = None
    speculative: bool = False
    root: Node = field(init=False)
    _follows: Node | None = field(init=False)  # as a step

    def __post_init__(self) -> None:
        above = self.parent
        self.root = self if above is None else above.root
        self._follows = None if above is None else above.replies_to

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def ended(self) -> bool:
        """True if the step's stop ends the whole path."""
        return self.stop is not None and self.stop.ends_path

    @property
    def complete(self) -> bool:
        """True if its reply ended by itself."""
        return self.stop is not None and self.stop.completes

    @property
    def depth(self) -> int:
        """Steps from the root."""
        return len(self.lineage) - 1

    @property
    def goes_on(self) -> bool:
        """True if it was opened in its parent's own round: the parent's step was judged by nobody,
        and the strategy not asked."""
        parent = None if self.speculative else self.parent
        return parent is not None and parent.round == self.round

    @property
    def level(self) -> int:
        """Rounds that the strategy has opened steps of this path in; without the steps that only
        went on, its depth."""
        return sum(not node.goes_on for node in self.path()[1:])

    @property
    def problem_id(self) -> str | int:
        """The lineage's first part."""
        return self.lineage[0]

    @property
    def step_text(self) -> str:
        """Text of this step alone."""
        parent_text = self.parent.text if self.parent is not None else ""
        return self.text[len(parent_text) :]

    @property
    def thinking(self) -> bool:
        """True if the path is inside a thought behind this step."""
        return self.thought and self.stop is not StopReason.THOUGHT_END

    def seen(self, sees: Sees) -> bool:
        """True if it is of the part of a reply that a verifier sees."""
        return sees == "both" or self.thought == (sees == "thought")

    @property
    def said(self) -> str:
        """The reply's text behind its last thought; all of it where there is none."""
        last = next((step for step in reversed(self.reply()) if step.thought), None)
        return self.text if last is None else self.text[len(last.text) :].lstrip()

    @property
    def thought_text(self) -> str:
        """Text of the reply's steps that are of a thought."""
        return "".join(step.step_text for step in self.reply() if step.thought).strip()

    def path(self) -> list[Node]:
        """Nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def reply(self) -> list[Node]:
        """Steps of the path's last reply, this one included: those after the prompt or a turn."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None and node.turn is None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def notes_of_reply(self) -> dict[str, str]:
        """What was written about its reply last."""
        return next((step.notes for step in reversed(self.reply()) if step.notes), {})

    @property
    def replies_to(self) -> Node:
        """The node that this step's reply follows: the root, or a turn."""
        return self if self.turn is not None or self._follows is None else self._follows

    @property
    def answers(self) -> bool:
        """True if the path's last reply is to answer the problem."""
        turn = self.replies_to.turn
        return turn is None or turn.answers

    def path_token_ids(self) -> list[int]:
        """All token ids from the prompt's first to this step's last."""
        return [token for node in self.path() for token in node.token_ids]

    @property
    def num_path_tokens(self) -> int:
        """Tokens after the prompt; those of turns are left out."""
        return sum(len(node.token_ids) for node in self.path()[1:] if node.turn is None)

    def __repr__(self) -> str:
        return f"Node({'.'.join(map(str, self.lineage))}, {self.state}, {len(self.token_ids)} tok)"


def on_paths(leaves: Iterable[Node]) -> set[Node]:
    """The nodes from the root to these, each once."""
    found: set[Node] = set()
    for leaf in leaves:
        node: Node | None = leaf
        while node is not None and node not in found:
            found.add(node)
            node = node.parent
    return found


def by_root(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Nodes of each tree, under the tree's root."""
    found: dict[Node, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.root, []).append(node)
    return found

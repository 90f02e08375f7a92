"""The node of a search tree: one reasoning step with its tokens, parent and score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

# The identity of a node: the problem id, then the child number at each level below the root.
Lineage = tuple[str | int, ...]
# The parts of a reply that a verifier scores.
Sees = Literal["answer", "thought", "both"]
# The most likely tokens at one position as (id, log-probability), the most likely first.
TopTokens = tuple[tuple[int, float], ...]


class StopReason(StrEnum):
    """The reason why a step ended.

    The last four members end the whole path. EOS and STOP_STRING complete the reply; PATH_LIMIT and
    CONTEXT_LIMIT truncate it.
    """

    DELIMITER = "delimiter"  # the text contains the delimiter between steps
    STEP_LENGTH = "step_length"  # the step has the fixed length of a step
    STEP_LIMIT = "step_limit"  # the step has as many tokens as the settings allow a step
    THOUGHT_END = "thought_end"  # the thought has ended, and an answer may follow
    EOS = "eos"
    STOP_STRING = "stop_string"
    PATH_LIMIT = "path_limit"  # the reply has `max_tokens` tokens
    CONTEXT_LIMIT = "context_limit"  # the model's context is full

    @cached_property
    def ends_path(self) -> bool:
        """True if no step may follow a step with this stop reason."""
        return self.completes or self in (StopReason.PATH_LIMIT, StopReason.CONTEXT_LIMIT)

    @property
    def completes(self) -> bool:
        """True if the model finished the reply, rather than a limit that truncated it."""
        return self in (StopReason.EOS, StopReason.STOP_STRING)


# The stop reasons that complete a reply, as texts: saved files and candidates contain texts. Older
# files also contain "probe".
COMPLETE_STOPS = ("probe", *(str(stop) for stop in StopReason if stop.completes))


class NodeState(StrEnum):
    """The state of a node in the search."""

    OPEN = "open"  # the step is being decoded or waits to be decoded
    CANDIDATE = "candidate"  # the step is decoded and waits for its score and for selection
    KEPT = "kept"  # selection kept the node: it has children or will get some
    FINISHED = "finished"  # the path has ended, and the node is a final candidate
    PRUNED = "pruned"


@dataclass(frozen=True)
class Turn:
    """A user message that a strategy adds: after a reply, or as a prompt of its own."""

    text: str
    # True: the next reply answers the problem. False: that reply comments on an answer.
    answers: bool
    # True: the message is a prompt of its own. Its replies read neither the problem's prompt nor
    # any other reply.
    alone: bool = False
    final: bool = False  # True: the reply is the answer of the search (`--choose synthesis`)
    # The answers that the message contains: lineages of their last nodes, without the problem id.
    sources: tuple[tuple[int, ...], ...] = ()


@dataclass(eq=False)
class Node:
    """A node of the search tree: the prompt (root), a step, or a turn between two replies.

    A turn is a user message in a conversation; its tokens are given, not generated.
    """

    lineage: Lineage
    parent: Node | None  # None for the root
    start: int  # position of the first token in the context; the prompt's tokens count
    state: NodeState = NodeState.OPEN
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    # Statistics of the distributions that the tokens were sampled from, by name: one value per
    # token. Only what a verifier or strategy requests (`Traits.token_stats`) is present.
    stats: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # The most likely tokens at each position, from the same distribution as `logprobs`. Empty
    # unless `top_logprobs` is set.
    top: tuple[TopTokens, ...] = ()
    # Text of the whole reply up to the end of this step, from the prompt or the last turn on. If a
    # stop string ended the step, the text ends before it. The stop string may begin in the parent's
    # text, which is not shortened.
    text: str = ""
    stop: StopReason | None = None  # None while the step is open
    thought: bool = False  # True if the step is part of a thought
    step_score: float | None = None  # the verifier's score of this step alone
    score: float | None = None  # the score of the path, aggregated over its steps
    children: list[Node] = field(default_factory=list)
    # One opaque KV handle per owner: "generator" or "verifier".
    handles: dict[str, Any] = field(default_factory=dict)
    # Tokens spent on this node, by kind: "overrun", "drafted", "draft_accepted", "speculated",
    # "speculated_kept", "generator_prefilled", "generator_reused", "verifier_prefilled",
    # "verifier_reused" and "verifier_generated". "prompt_unread" counts tokens before this node
    # that a remote server cut off its prompt. "judge_unparsed" counts critiques without a score.
    usage: Counter[str] = field(default_factory=Counter)
    # Texts that a verifier wrote about this step, by kind (for example "critique").
    notes: dict[str, str] = field(default_factory=dict)
    answer: str | None = None  # the answer that the reply states; set on ended paths
    vote: str | None = None  # one canonical text for all equal answers; set on ended paths
    problem_text: str = ""  # the problem as the verifier reads it (root only)
    now: str | None = None  # the time that chat templates see (root only)
    # True if the problem is a raw prompt. The reply is then one text that includes its thoughts
    # (root only).
    raw: bool = False
    # True if the prompt ends with a start-of-thought mark that the user wrote, not the chat
    # template (root only).
    quoted: bool = False
    greedy: bool = False  # True: a rollout, whose tokens are the most likely ones, not sampled ones
    round: int = 0  # the round that opened the node; 0 for the root, and rounds count from 1
    turn: Turn | None = None  # the user message, if the node is a turn
    # True while selection has not opened the node: it has a parent but is not in `children`.
    speculative: bool = False
    root: Node = field(init=False)  # the node that owns the prompt
    _replied_node: Node | None = field(init=False)  # `replies_to`, if this node is a step

    def __post_init__(self) -> None:
        above = self.parent
        self.root = self if above is None else above.root
        self._replied_node = None if above is None else above.replies_to

    @property
    def above(self) -> Node | None:
        """The node whose tokens come directly before this node's tokens.

        None for the root and for a turn that begins a prompt of its own.
        """
        alone = self.turn is not None and self.turn.alone
        return None if alone and self.parent is self.root else self.parent

    def context(self) -> list[Node]:
        """Return the nodes whose tokens this node reads, from its prompt to the node itself.

        This is the path from the root, or from the turn that began a prompt of its own.
        """
        path = self.path()
        return path[1:] if len(path) > 1 and path[1].above is None else path

    @property
    def end(self) -> int:
        """Position after the node's last token."""
        return self.start + len(self.token_ids)

    @property
    def ended(self) -> bool:
        """True if the path ends with this step, because the reply is complete or truncated."""
        return self.stop is not None and self.stop.ends_path

    @property
    def complete(self) -> bool:
        """True if the model finished the reply with this step, so no limit truncated it."""
        return self.stop is not None and self.stop.completes

    @property
    def depth(self) -> int:
        """Number of nodes from the root to this node, without the root."""
        return len(self.lineage) - 1

    @property
    def is_continuation(self) -> bool:
        """True if the node continues its parent in the same round, without selection between them.

        The parent is then a turn, or a step that `--verify-every` leaves without a score.
        """
        parent = None if self.speculative else self.parent
        return parent is not None and parent.round == self.round

    @property
    def level(self) -> int:
        """Number of rounds in which selection has extended this path.

        It is `depth` without the nodes for which `is_continuation` is true.
        """
        return sum(not node.is_continuation for node in self.path()[1:])

    @property
    def problem_id(self) -> str | int:
        """The id of the problem that this node's tree belongs to."""
        return self.lineage[0]

    @property
    def step_text(self) -> str:
        """Text of this step alone."""
        parent_text = self.parent.text if self.parent is not None else ""
        return self.text[len(parent_text) :]

    @property
    def thinking(self) -> bool:
        """True if the thought (<think> block) is still open after this step."""
        return self.thought and self.stop is not StopReason.THOUGHT_END

    def is_seen_by(self, sees: Sees) -> bool:
        """Return True if this step is in the part of the reply that `sees` names."""
        return sees == "both" or self.thought == (sees == "thought")

    @property
    def said(self) -> str:
        """Text of the reply after its last thought: the part that states the answer."""
        last = next((step for step in reversed(self.reply()) if step.thought), None)
        return self.text if last is None else self.text[len(last.text) :].lstrip()

    @property
    def thought_text(self) -> str:
        """Text of the reply's thoughts."""
        return "".join(step.step_text for step in self.reply() if step.thought).strip()

    def path(self) -> list[Node]:
        """Return the nodes from the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def reply(self) -> list[Node]:
        """Return the steps of the path's last reply, up to and including this step.

        A reply starts after the prompt or after a turn.
        """
        nodes: list[Node] = []
        node = self
        while node.parent is not None and node.turn is None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def notes_of_reply(self) -> dict[str, str]:
        """The verifier's latest notes on the reply: those of the last step that has any."""
        return next((step.notes for step in reversed(self.reply()) if step.notes), {})

    @property
    def replies_to(self) -> Node:
        """The node that this step's reply answers: the root (prompt) or a turn.

        For the root and for a turn, the value is the node itself.
        """
        return self if self.turn is not None or self._replied_node is None else self._replied_node

    @property
    def answers(self) -> bool:
        """True if the path's last reply answers the problem rather than commenting on an answer."""
        turn = self.replies_to.turn
        return turn is None or turn.answers

    def path_token_ids(self) -> list[int]:
        """Return all token ids of the context, from the prompt's first to this step's last."""
        return [token for node in self.context() for token in node.token_ids]

    @property
    def num_path_tokens(self) -> int:
        """Number of generated tokens of the path: the prompt and turns do not count."""
        return sum(len(node.token_ids) for node in self.path()[1:] if node.turn is None)

    def __repr__(self) -> str:
        return f"Node({'.'.join(map(str, self.lineage))}, {self.state}, {len(self.token_ids)} tok)"


def nodes_on_paths(leaves: Iterable[Node]) -> set[Node]:
    """Return the union of the paths from the roots to `leaves`."""
    nodes: set[Node] = set()
    for leaf in leaves:
        node: Node | None = leaf
        while node is not None and node not in nodes:
            nodes.add(node)
            node = node.parent
    return nodes


def group_by_root(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Group `nodes` by the root of their tree."""
    by_tree: dict[Node, list[Node]] = {}
    for node in nodes:
        by_tree.setdefault(node.root, []).append(node)
    return by_tree

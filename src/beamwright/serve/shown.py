"""What the page shows of a tree's nodes, and what of it has changed since it was last told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beamwright.finite import finite
from beamwright.search.answers import extract_answer, normalise_answer
from beamwright.serve.events import StepEvent
from beamwright.tree import Node, NodeState, SearchTree

Places = Callable[[Node], str | None]
"""Where the KV of a node is."""


class PageTree:
    """One tree as the page knows it. Looks at a tree only in the thread that grows it.

    places: None where nobody knows.
    """

    def __init__(self, places: Places | None = None) -> None:
        self._places = places
        self._known: dict[Node, tuple[Any, ...]] = {}
        self._kv: dict[Node, str | None] = {}
        self.num_tokens = 0

    def changes(self, tree: SearchTree, *, texts: bool = True) -> list[StepEvent]:
        """New nodes and what has changed of others, parents first; looks past pruned branches.

        texts: send the text of new steps too.
        """
        found: list[StepEvent] = []
        stack = [tree.root]
        while stack:
            node = stack.pop()
            changed = self._change(node, texts=texts)
            if changed is not None:
                found.append(changed)
            if node.state is not NodeState.PRUNED or changed is not None:
                stack.extend(reversed(node.children))
        return found

    def over(self, tree: SearchTree) -> list[StepEvent]:
        """What has changed last; that no step has KV any more goes without saying."""
        self._places = None
        self._kv.clear()
        return self.changes(tree)

    def _change(self, node: Node, *, texts: bool) -> StepEvent | None:
        now = (node.state, node.score, node.step_score, node.stop, len(node.token_ids))
        before = self._known.get(node)
        if now == before and node.state is NodeState.PRUNED and self._kv.get(node) is None:
            return None  # most of a large tree
        kv = None if self._places is None else self._places(node)
        moved = self._kv.get(node) != kv
        if now == before and not moved:
            return None
        step: StepEvent = {"lineage": lineage(node)}
        if now != before:
            self._known[node] = now
            written = before is None or before[-1] != now[-1]
            step.update(facts(node) if written else judged(node))
            self.num_tokens += len(node.token_ids) - (0 if before is None else before[-1])
            if not texts:
                step["text"] = None
        if moved:
            step["kv"] = self._kv[node] = kv
        return step


def lineage(node: Node) -> str:
    """Dotted child ordinals from the prompt: the problem's id is left out."""
    return ".".join(map(str, node.lineage[1:]))


def facts(node: Node) -> StepEvent:
    """All there is to show of a node."""
    step: StepEvent = {
        **judged(node),
        "round": node.round,
        "tokens": len(node.token_ids),
        "text": node.step_text if node.turn is None else node.turn.text,
    }
    if node.usage["speculated_kept"]:
        step["ahead"] = node.usage["speculated_kept"]
    return step


def judged(node: Node) -> StepEvent:
    """What a verdict changes of a node."""
    step: StepEvent = {
        "lineage": lineage(node),
        "state": node.state.value,
        "stop": None if node.stop is None else node.stop.value,
        "score": finite(node.score),
        "step_score": finite(node.step_score),
    }
    if node.notes:
        step["notes"] = dict(node.notes)
    if node.state is NodeState.FINISHED:
        step["answer"] = extract_answer(node.text)
        step["vote"] = normalise_answer(step["answer"]) if step["answer"] else None
    return step

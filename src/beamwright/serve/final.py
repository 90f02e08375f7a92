"""Final text: what every candidate that can still win has in common. No server streams less.

Under a strategy that commits (`StrategyRow.commits`) a step with children gets no more, so who can
still win is a leaf that is not pruned; a leaf that is being written says what its parent does.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.tree import Node, NodeState, SearchTree

_BROKEN = "\ufffd"  # the first bytes of a character that is not complete


def contenders(tree: SearchTree) -> list[Node]:
    """The nodes whose text every possible answer begins with one of."""
    found: list[Node] = []
    waiting = [tree.root]
    while waiting:
        node = waiting.pop()
        if node.state is NodeState.PRUNED:
            continue
        children = [each for each in node.children if not each.speculative]
        if node.state is NodeState.OPEN and node.parent is not None:
            found.append(node.parent)
        elif children:
            waiting += children
        else:
            found.append(node)
    return found


def final_text(tree: SearchTree, stops: Sequence[str] = ()) -> str:
    """Text that the answer will begin with, whatever else is decided.

    stops: strings that end an answer: what may be the beginning of one is held back.
    """
    texts = [node.text for node in contenders(tree)]
    return held_back(common(min(texts), max(texts)), stops)  # all others lie between these two


def common(one: str, other: str) -> str:
    """What both begin with."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[: min(len(one), len(other)) if length is None else length]


def held_back(text: str, stops: Sequence[str]) -> str:
    """Without what may yet become another character, or be cut off as a stop string."""
    text = text.rstrip(_BROKEN)
    keep = len(text)
    for stop in stops:
        for length in range(min(len(stop), len(text)), 0, -1):
            if stop.startswith(text[-length:]):
                keep = min(keep, len(text) - length)
                break
    return text[:keep]

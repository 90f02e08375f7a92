"""What step-wise strategies have in common: a round's candidates, and when the search is over.

Finished candidates keep their place: a round extends n minus the finished, so that a search ends
with exactly n candidates. search-and-learn replicates to n and overshoots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beamwright.protocols import Action, Complete, Extend, Finish, Prune
from beamwright.search.ranking import duplicates
from beamwright.sections import SearchSettings
from beamwright.tree import Node, SearchTree


@dataclass(frozen=True)
class Round:
    """A round's candidates.

    going: those that can go on, in lineage order. slots: children to give out among them.
    actions: what is decided already. decided: that is all; the search begins, or has ended.
    """

    going: tuple[Node, ...]
    slots: int
    actions: tuple[Action, ...]
    decided: bool


def open_round(tree: SearchTree, settings: SearchSettings, level: int | None = None) -> Round:
    """Begin with n paths; later set finished candidates aside, drop duplicates if asked to, and
    see if the search is over.

    level: steps of the candidates, where that is not the number of rounds.
    """
    if tree.rounds == 0:
        return Round((), settings.n, (Extend(tree.root, settings.n),), decided=True)
    candidates = tree.candidates()
    dropped = duplicates(candidates) if settings.filter_duplicates else []
    ended = [node for node in candidates if node.ended and node not in dropped]
    going = tuple(node for node in candidates if not node.ended and node not in dropped)
    actions: list[Action] = [*map(Prune, dropped), *map(Complete, ended)]
    slots = settings.n - len(tree.finished()) - len(ended)
    if slots <= 0:
        ending: list[Action] = [*map(Prune, going), Finish()]
    elif not going:
        ending = [Finish(f"{slots} of {settings.n} paths were duplicates")]
    elif (tree.rounds if level is None else level) >= settings.max_rounds:
        ending = [Finish(f"{slots} of {settings.n} paths reached --max-rounds")]
    else:
        return Round(going, slots, tuple(actions), decided=False)
    return Round(going, slots, (*actions, *ending), decided=True)


def give_children(nodes: Sequence[Node], shares: Sequence[int]) -> list[Action]:
    """So many children for each; who gets none is pruned."""
    return [
        Extend(node, share) if share else Prune(node)
        for node, share in zip(nodes, shares, strict=True)
    ]

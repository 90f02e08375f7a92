"""When a search ends before its strategy would end it: time, tokens, votes.

Pure: sees a tree whose round is scored, and seconds; no clock, no models. Part of every anytime
search: whatever stops it, the best so far is its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from beamwright.engine.validation import call_policy
from beamwright.errors import InputError, PolicyError
from beamwright.protocols import Action, Complete, Finish, Prune
from beamwright.search import strategy_row
from beamwright.search.answers import extract_answer, normalise_answer
from beamwright.search.lookahead import rolled_from, rollout
from beamwright.search.rounds import TIE, duplicates, ranked
from beamwright.sections import SearchSettings, StopSettings
from beamwright.tree import Node, NodeState, SearchTree


def check_stops(
    settings: StopSettings, search: SearchSettings, *, probabilities: bool | None = None
) -> None:
    """See if votes can be settled before all of them are cast.

    search: with the choice of the answer filled in. probabilities: scores lie between 0 and 1;
    None if that is not known yet.

    Raises:
        InputError: if they cannot; says which --choose would do.
    """
    votes_change = strategy_row(search).votes_change
    if settings.stop_votes and votes_change is not None:
        raise InputError(f"--stop-votes: with --search {search.search} {votes_change}")
    if not settings.stop_votes or search.choose == "majority":
        return
    if search.choose != "weighted":
        raise InputError(
            f"--stop-votes goes with --choose majority or weighted, not {search.choose}: "
            "any candidate may still be the best"
        )
    if probabilities is False:
        raise InputError(
            "--stop-votes with --choose weighted needs a verifier whose scores are probabilities; "
            "use --choose majority"
        )


StopFunction = Callable[[SearchTree], str | None]
"""A stop of the user's own: why a tree, whose round is scored, ends here; None to go on."""


class StopRule:
    """The stops of one search.

    search: how many candidates it is to end with, whether equal texts count once, and how the
    answer is chosen, which is what votes are settled for. functions: the user's own, asked after
    all others.
    """

    def __init__(
        self,
        settings: StopSettings,
        search: SearchSettings,
        functions: Sequence[StopFunction] = (),
    ) -> None:
        self._functions = functions
        self._settings, self._search, self._n = settings, search, search.n
        self._row = strategy_row(search)

    @property
    def paths_stand_alone(self) -> bool:
        """True if the strategy judges every path for itself, in half a round as in a whole one."""
        return not self._row.competes

    @property
    def deadline(self) -> str:
        """What is said when it has passed."""
        return f"--deadline {self._settings.deadline:g}s had passed"

    def out_of_time(self, elapsed_s: float) -> bool:
        """True if the deadline has passed."""
        return self._settings.deadline is not None and elapsed_s >= self._settings.deadline

    def why(
        self,
        tree: SearchTree,
        elapsed_s: float,
        actions: Sequence[Action] = (),
        *,
        cut: bool = False,
    ) -> str | None:
        """What stops this tree, whose candidates are scored; None to go on.

        actions: what the strategy would do; whom it gives up for good does not count.

        elapsed_s: seconds since the search started, or was resumed. Rollouts of a lookahead are
        no candidates, and are ended first, unless the deadline has cut them off.
        """
        if not cut and any(node.greedy for node in tree.candidates()):
            return None
        settings, candidates = self._settings, self._candidates(tree, actions)
        ended = [n for n in (*tree.finished(), *candidates) if n.ended and n.answers]
        if settings.stop_votes:
            voters = ended
            if self._row.finals is not None:  # the first n to finish vote, say
                voters = self._row.finals(ended, self._n)[: len(ended)]
            remaining = max(0, self._n - len(voters))
            if vote_is_settled(voters, remaining, weighted=self._search.choose == "weighted"):
                return "the vote was settled (--stop-votes)"
        if settings.token_budget is not None and num_generated(tree) >= settings.token_budget:
            return f"--token-budget {settings.token_budget} was spent"
        if self.out_of_time(elapsed_s):
            return self.deadline
        reasons = (_asked(stop, tree) for stop in self._functions)
        return next((reason for reason in reasons if reason is not None), None)

    def ending(self, tree: SearchTree, why: str, actions: Sequence[Action] = ()) -> list[Action]:
        """End the search: ended paths are complete; of the rest the best-scored stay as
        unfinished candidates, as many as there are places left.
        """
        kept, given_up = self._candidates(tree, actions), self._given_up(actions)
        out = {node for node in given_up if node.state is NodeState.FINISHED}
        places = self._n - len(tree.finished()) - len(given_up - out)
        if not self._row.competes:  # what such a strategy has pruned keeps its place
            places -= sum(node.state is NodeState.PRUNED for node in tree.nodes())
        ended = [node for node in kept if node.ended]
        if self._row.finals is None:
            ended = ranked(ended)[:places]
        left = max(0, places - len(ended))
        shown = max(0, left - len(cut_short(tree)))
        unfinished = ranked(node for node in kept if not node.ended)[:shown]
        staying = {*ended, *unfinished}
        dropped = [
            node
            for leaf in tree.candidates()
            if leaf not in staying
            for node in rollout(leaf) or [leaf]
        ]
        reason = f"{left} of {self._n} paths were unfinished when {why}" if left else None
        lost = [node for node in tree.finished() if node in out]
        return [*map(Prune, [*lost, *dropped]), *map(Complete, ended), Finish(reason)]

    def _given_up(self, actions: Sequence[Action]) -> set[Node]:
        """Whom a strategy without competition prunes: they are out, whatever else happens."""
        if self._row.competes:
            return set()
        return {action.node for action in actions if isinstance(action, Prune)}

    def _candidates(self, tree: SearchTree, actions: Sequence[Action]) -> list[Node]:
        """Candidates without rollouts, those given up, and duplicates where those are dropped."""
        candidates = [node for node in tree.candidates() if not node.greedy]
        dropped: Iterable[Node] = self._given_up(actions)
        if self._search.filter_duplicates and self._row.competes:
            dropped = duplicates(candidates)
        return [node for node in candidates if node not in dropped]


def _asked(stop: StopFunction, tree: SearchTree) -> str | None:
    name = f"stop {getattr(stop, '__name__', type(stop).__name__)}"
    why: Any = call_policy(name, stop, tree)
    if why is not None and not isinstance(why, str):
        raise PolicyError(f"{name}: it returned {type(why).__name__}, not a reason or None")
    return why


def cut_short(tree: SearchTree) -> list[Node]:
    """Paths whose turn did not come before a deadline struck in the middle of a round."""
    return list(dict.fromkeys(rolled_from(node) for node in tree.nodes() if _waits(node)))


def _waits(node: Node) -> bool:
    """True for a survivor whose children are all open still, or that was rolled out in vain."""
    if node.parent is None or node.state is not NodeState.KEPT or not node.children:
        return False
    drawn = [child for child in node.children if not child.greedy]
    if drawn:
        return all(child.state is NodeState.OPEN for child in drawn)
    return all(child.state in (NodeState.OPEN, NodeState.PRUNED) for child in node.children)


def vote_is_settled(ended: Iterable[Node], num_remaining: int, *, weighted: bool = False) -> bool:
    """True if the leading answer stays so whatever the remaining candidates say.

    Who votes is who votes in `search.choose`: paths that ended by themselves and state an answer.
    An answer that could draw level could still win by its scores. weighted: scores are summed; they
    have to be probabilities, so that a candidate that remains adds at most 1 to an answer.
    """
    votes: dict[str, list[float]] = {}
    for node in ended:
        answer = extract_answer(node.text) if node.complete else None
        vote = node.score if weighted else 1.0
        if answer and vote is not None:
            votes.setdefault(normalise_answer(answer), []).append(vote)
    totals = sorted(map(math.fsum, votes.values()), reverse=True)
    most, second = (*totals, 0.0, 0.0)[:2]
    return most > second + num_remaining + TIE


def num_generated(tree: SearchTree) -> int:
    """Tokens of all decoded steps, pruned ones included."""
    return sum(
        len(node.token_ids)
        for node in tree.nodes()
        if node.parent is not None and node.turn is None and node.state is not NodeState.OPEN
    )

"""When a search ends before its strategy would end it: time, tokens, votes, score.

Pure: sees a tree whose round is scored, and seconds; no clock, no models. Part of every anytime
search: whatever stops it, the best so far is its result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from beamwright.config import StopSettings
from beamwright.protocols import Action, Complete, Finish, Prune
from beamwright.search.answers import extract_answer, normalise_answer
from beamwright.search.lookahead import rollout
from beamwright.search.ranking import duplicates
from beamwright.tree import Node, NodeState, SearchTree, StopReason


class StopRule:
    """The stops of one search.

    n: how many candidates it is to end with. filter_duplicates: equal texts count once.
    """

    def __init__(self, settings: StopSettings, n: int, *, filter_duplicates: bool = False) -> None:
        self._settings, self._n = settings, n
        self._filter_duplicates = filter_duplicates

    @property
    def watches_clock(self) -> bool:
        """True if the time has to be looked at within a round, too."""
        return self._settings.deadline is not None

    def out_of_time(self, elapsed_s: float) -> bool:
        """True if the deadline has passed."""
        return self._settings.deadline is not None and elapsed_s >= self._settings.deadline

    def why(self, tree: SearchTree, elapsed_s: float) -> str | None:
        """What stops this tree, whose candidates are scored; None to go on.

        elapsed_s: seconds since the search started, or was resumed. Rollouts of a lookahead are
        no candidates, and are ended first.
        """
        if any(node.greedy for node in tree.candidates()):
            return None
        settings, candidates = self._settings, self._candidates(tree)
        ended = [n for n in (*tree.finished(), *candidates) if n.ended and n.answers]
        if settings.stop_score is not None and reaches(ended, settings.stop_score):
            return f"a candidate had reached --stop-score {settings.stop_score:g}"
        if settings.stop_votes and vote_is_settled(ended, self._n - len(ended)):
            return "the vote was settled (--stop-votes)"
        if settings.token_budget is not None and num_generated(tree) >= settings.token_budget:
            return f"--token-budget {settings.token_budget} was spent"
        if self.out_of_time(elapsed_s):
            return f"--deadline {settings.deadline:g}s had passed"
        return None

    def ending(self, tree: SearchTree, why: str) -> list[Action]:
        """End the search: ended paths are complete, the rest stays as unfinished candidates."""
        kept = self._candidates(tree)
        ended = [node for node in kept if node.ended]
        left = max(0, self._n - len(tree.finished()) - len(ended))
        reason = f"{left} of {self._n} paths were unfinished when {why}"
        dropped = [
            node
            for leaf in tree.candidates()
            if leaf not in kept
            for node in rollout(leaf) or [leaf]
        ]
        return [*map(Prune, dropped), *map(Complete, ended), Finish(reason)]

    def _candidates(self, tree: SearchTree) -> list[Node]:
        """Candidates without rollouts, and without duplicates where those are dropped."""
        found = [node for node in tree.candidates() if not node.greedy]
        dropped = duplicates(found) if self._filter_duplicates else []
        return [node for node in found if node not in dropped]


def reaches(ended: Iterable[Node], score: float) -> bool:
    """True if a path that ended by itself has at least this score."""
    return any(
        node.score is not None and node.score >= score
        for node in ended
        if node.stop is StopReason.EOS
    )


def vote_is_settled(ended: Iterable[Node], num_remaining: int) -> bool:
    """True if the most frequent answer stays so whatever the remaining candidates say.

    Who votes is who votes in `search.choose`: paths that ended by themselves and state an answer.
    An answer that could draw level could still win by its scores.
    """
    answers = (extract_answer(node.text) for node in ended if node.stop is StopReason.EOS)
    votes = Counter(normalise_answer(answer) for answer in answers if answer)
    (_, most), (_, second) = (*votes.most_common(2), ("", 0), ("", 0))[:2]
    return most > second + num_remaining


def num_generated(tree: SearchTree) -> int:
    """Tokens of all decoded steps, pruned ones included."""
    return sum(
        len(node.token_ids)
        for node in tree.nodes()
        if node.parent is not None and node.turn is None and node.state is not NodeState.OPEN
    )

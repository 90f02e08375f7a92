"""What is decided about a tree: policies' actions, checked, and what ends a search before its time.

What a strategy, a schedule or a user's stop asks for is checked before the loop does it, whoever
wrote it: one that would hang the loop, or be half obeyed, ends the search with an error that names
it. A search ends early by time, tokens or votes, with the best so far as its result. Pure:
sees a tree whose round is scored, and seconds; no clock, no models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from beamwright.errors import BeamwrightError, InputError, PolicyError, line_of
from beamwright.protocols import (
    Action,
    Answers,
    Ask,
    Complete,
    Extend,
    Finish,
    Foresees,
    Plan,
    Prospect,
    Prune,
    SchedulePolicy,
    ScheduleView,
    Strategy,
)
from beamwright.search import strategy_row
from beamwright.search.lookahead import rolled_from, rollout
from beamwright.search.rounds import TIE, duplicates, ranked
from beamwright.sections import SearchSettings, StopSettings
from beamwright.tree import Node, NodeState, SearchTree

_ACTIONS = (Extend, Ask, Prune, Complete, Finish)
_SETTLED = "the vote was settled (--stop-votes)"

StopFunction = Callable[[SearchTree], str | None]
"""A stop of the user's own: why a tree, whose round is scored, ends here; None to go on."""

# --- what policies ask for --------------------------------------------------------------------


def decided(strategy: Strategy, tree: SearchTree, rng: Any) -> list[Action]:
    """The actions of a strategy.

    Raises:
        PolicyError: if it raises, if something is no action or cannot be done, or if nothing would
            be left to do while the search goes on.
    """
    name = f"strategy {policy_name(strategy)}, round {tree.rounds}"
    answer = call_policy(name, strategy.select, tree, rng)
    if not isinstance(answer, Iterable) or isinstance(answer, str):
        raise PolicyError(f"{name}: select returned {_shown(answer)}, not a list of actions")
    actions = list(answer)
    judged: set[Node] = set()
    for action in actions:
        if not isinstance(action, _ACTIONS):
            kinds = ", ".join(kind.__name__ for kind in _ACTIONS)
            raise PolicyError(f"{name}: {_shown(action)} is no action ({kinds})")
        if not isinstance(action, Finish):
            problem = "decides twice about" if action.node in judged else _wrong(action, tree)
            if problem:
                raise PolicyError(f"{name}: {problem} {_shown(action.node)}")
            judged.add(action.node)
    if not any(isinstance(action, Extend | Ask | Finish) for action in actions):
        num_waiting = len(tree.candidates())
        raise PolicyError(
            f"{name}: neither extends a path nor finishes the search; {num_waiting} "
            "candidates wait, and nothing would ever happen again"
        )
    return actions


def foreseen(
    strategy: Strategy, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
) -> list[Prospect]:
    """What a strategy may extend when the round of these beams is over; nothing if it does not say.

    Raises:
        PolicyError: if it raises, or something is no prospect of an unended step of this tree.
    """
    if not isinstance(strategy, Foresees):
        return []
    name = f"strategy {policy_name(strategy)}, round {tree.rounds + 1}"
    prospects = list(call_policy(name, strategy.prospects, tree, beams, ahead))
    for prospect in prospects:
        if not isinstance(prospect, Prospect):
            raise PolicyError(f"{name}: {_shown(prospect)} is no Prospect")
        if problem := _wrong(Extend(prospect.node, prospect.children), tree):
            raise PolicyError(f"{name}: foresees {problem} {_shown(prospect.node)}")
    return prospects


def planned(schedule: SchedulePolicy, view: ScheduleView) -> Plan:
    """The plan of a schedule, without empty groups.

    Raises:
        PolicyError: if it raises, or its groups are not distinct beams of the view, at least one.
    """
    name = f"schedule {policy_name(schedule)}"
    plan = call_policy(name, schedule.plan, view)
    if not isinstance(plan, Plan):
        raise PolicyError(f"{name}: plan returned {_shown(plan)}, not a Plan")
    groups = tuple(tuple(group) for group in plan.groups if group)
    known, seen = set(view.beams), set()
    for beam in (beam for group in groups for beam in group):
        if beam not in known:
            raise PolicyError(f"{name}: {_shown(beam)} in a group is no beam that waits")
        if beam in seen:
            raise PolicyError(f"{name}: {_shown(beam)} is in two groups, or twice in one")
        seen.add(beam)
    if not groups and view.beams:
        raise PolicyError(f"{name}: an empty plan, while {len(view.beams)} beams wait")
    return replace(plan, groups=groups)


def policy_name(policy: Any) -> str:
    """What a person calls it: its declared name, or its class."""
    chosen = getattr(getattr(policy, "search", None), "search", None)
    name = chosen or getattr(policy, "name", None)
    return name if isinstance(name, str) else type(policy).__name__


def call_policy(name: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """What a user's policy answers.

    Raises:
        PolicyError: for whatever it raises.
    """
    try:
        return method(*arguments)
    except BeamwrightError:
        raise
    except Exception as error:
        raise PolicyError(f"{name}: it raised {line_of(error)}") from error


def note_answers(way: Answers, nodes: Iterable[Node]) -> None:
    """Write on ended nodes what their replies state, where it is not there yet.

    Raises:
        PolicyError: if a plugin raises, or gives no text.
    """
    name = f"answers {type(way).__name__}"
    for node in nodes:
        if node.vote is not None:
            continue
        answer, vote = call_policy(name, way.read, node.said), None
        if isinstance(answer, str) and answer.strip():
            vote = call_policy(name, way.key, answer, node.notes_of_reply)
        if not isinstance(answer, str | None) or not isinstance(vote, str | None):
            raise PolicyError(f"{name}: {_shown(answer)} and {_shown(vote)} are no texts")
        node.answer, node.vote = answer, vote


def _wrong(action: Extend | Ask | Prune | Complete, tree: SearchTree) -> str | None:
    """Why an action cannot be obeyed; None if it can."""
    node: Any = action.node
    if not isinstance(node, Node) or node.root is not tree.root:
        return "acts on what is no node of this tree:"
    waits = node.state is NodeState.CANDIDATE
    why: str | None = None
    match action:
        case Extend(children=children) if type(children) is not int or children < 1:
            why = f"gives {_shown(children)} children to"
        case Extend() if node.ended:
            why = "extends a path that has ended:"
        case Extend() if not waits and node.state is not NodeState.KEPT:
            why = f"extends a node that is {node.state}:"
        case Ask() if not (waits and node.ended):
            why = "asks about what is no ended candidate:"
        case Complete() if not waits:
            why = f"completes a node that is {node.state}:"
        case Prune() if node.parent is None or node.state is NodeState.OPEN:
            why = "prunes what is not decoded:"
    return why


def _shown(value: Any) -> str:
    if isinstance(value, Node):
        return f"path {'.'.join(map(str, value.lineage))}"
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."


# --- what ends a search -----------------------------------------------------------------------


def check_stops(
    settings: StopSettings, search: SearchSettings, *, probabilities: bool | None = None
) -> None:
    """See if votes can be settled before all of them are cast.

    search: with the choice of the answer filled in. probabilities: scores lie between 0 and 1;
    None if that is not known yet.

    Raises:
        InputError: if they cannot; says which --choose would do.
    """
    votes, sure = settings.stop_votes, settings.stop_confidence is not None
    choose, votes_change = search.choose, strategy_row(search).votes_change
    why: str | None = None
    if votes and votes_change is not None:
        why = f"--stop-votes: with --search {search.search} {votes_change}"
    elif sure and choose != "majority":
        why = f"--stop-confidence: a majority's, not with --choose {choose}"
    elif sure and not (search.model_extra or {}).get("wave"):
        why = "--stop-confidence needs --wave: it looks between two waves of paths"
    elif votes and choose not in ("majority", "weighted"):
        why = f"--stop-votes goes with --choose majority or weighted, not {choose}: "
        why += "any candidate may still be the best"
    elif votes and choose == "weighted" and probabilities is False:
        why = "--stop-votes with --choose weighted needs a verifier whose scores are "
        why += "probabilities; use --choose majority"
    if why is not None:
        raise InputError(why)


class StopRule:
    """The stops of one search.

    search: how many candidates it is to end with, whether equal texts count once, and how the
    answer is chosen, which is what votes are settled for. functions: the user's own, asked after
    all others. deadline: what is said when it has passed.
    """

    def __init__(
        self, settings: StopSettings, search: SearchSettings, functions: Sequence[StopFunction] = ()
    ) -> None:
        self._settings, self._search, self._n = settings, search, search.n
        self._row, self._functions = strategy_row(search), functions
        self.deadline = f"--deadline {settings.deadline or 0:g}s had passed"
        self._sure = f"the vote was clear (--stop-confidence {settings.stop_confidence})"
        self._first = f"the first {settings.first_k} had finished (--first-k)"
        self._spent = f"--token-budget {settings.token_budget} was spent"

    @property
    def paths_stand_alone(self) -> bool:
        """True if the strategy judges every path for itself, in half a round as in a whole one."""
        return not self._row.competes

    def is_of_the_tree(self, why: str) -> bool:
        """True if the same tree would be stopped there again, whatever the time."""
        return why in (_SETTLED, self._spent, self._first, self._sure)

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
                return _SETTLED
        if self._is_clear(ended, candidates):
            return self._sure
        if settings.first_k is not None and sum(n.complete for n in ended) >= settings.first_k:
            return self._first
        if settings.token_budget is not None and num_generated(tree) >= settings.token_budget:
            return self._spent
        return self.deadline if self.out_of_time(elapsed_s) else self._asked(tree)

    def _is_clear(self, ended: Sequence[Node], candidates: Sequence[Node]) -> bool:
        """True between two waves if the vote is clear; paths that end first may agree more."""
        sure = self._settings.stop_confidence
        whole = len(ended) < self._n and all(node.ended for node in candidates)
        return sure is not None and whole and lead_confidence(ended) >= sure

    def _asked(self, tree: SearchTree) -> str | None:
        """What the first of the user's own stops says that has a reason."""
        for stop in self._functions:
            name = f"stop {getattr(stop, '__name__', type(stop).__name__)}"
            why: Any = call_policy(name, stop, tree)
            if isinstance(why, str):
                return why
            if why is not None:
                raise PolicyError(f"{name}: it returned {type(why).__name__}, not a reason or None")
        return None

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
            dropped = duplicates(candidates, self._search.width if self._row.apart else None)
        return [node for node in candidates if node not in dropped]


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
        weight = node.score if weighted else 1.0
        if node.complete and node.vote is not None and weight is not None:
            votes.setdefault(node.vote, []).append(weight)
    totals = sorted(map(math.fsum, votes.values()), reverse=True)
    most, second = (*totals, 0.0, 0.0)[:2]
    return most > second + num_remaining + TIE


def lead_confidence(ended: Iterable[Node]) -> float:
    """How likely the leading answer is the more frequent one of the two that lead.

    Of its share among the two, Beta-distributed by their votes: Adaptive-Consistency (Aggarwal et
    al. 2023), whose stop this is.
    """
    votes = [node.vote for node in ended if node.complete and node.vote is not None]
    first, second = (*(count for _, count in Counter(votes).most_common(2)), 0, 0)[:2]
    total = first + second + 1
    return sum(math.comb(total, k) for k in range(first + 1)) / 2.0**total if first else 0.0


def num_generated(tree: SearchTree) -> int:
    """Tokens of all decoded steps, pruned ones included."""
    return sum(
        len(node.token_ids)
        for node in tree.nodes()
        if node.parent is not None and node.turn is None and node.state is not NodeState.OPEN
    )

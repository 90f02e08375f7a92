"""Validation of what strategies and schedules return, and the rules that stop a search early.

Results of policies, built-in or a user's, are checked before the engine applies them. A result that
would hang the engine, or could be applied only in part, ends the search with an error that names
the policy. A search can stop early by time, tokens or votes, with the best candidates so far as its
result. All functions here are pure: they get a tree and seconds, and read no clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from beamwright.errors import BeamwrightError, InputError, PolicyError, error_line
from beamwright.protocols import (
    Action,
    Answers,
    Ask,
    EndSearch,
    Extend,
    FinishPath,
    Foresees,
    Plan,
    Prospect,
    Prune,
    SchedulePolicy,
    ScheduleView,
    Strategy,
)
from beamwright.search import strategy_entry
from beamwright.search.lookahead import rollout_start, rollout_steps
from beamwright.search.rounds import TIE, find_duplicates, sort_by_rank
from beamwright.sections import SearchSettings, StopSettings
from beamwright.tree import Node, NodeState, SearchTree

_ACTIONS = (Extend, Ask, Prune, FinishPath, EndSearch)
_SETTLED = "the vote was settled (--stop-votes)"

# A user's stop function: returns why a tree with a scored round ends here; None to go on.
StopFunction = Callable[[SearchTree], str | None]

# --- checks of policies -----------------------------------------------------------------------


def select_actions(strategy: Strategy, tree: SearchTree, rng: Any) -> list[Action]:
    """Return the checked actions of a strategy.

    Raises:
        PolicyError: if the strategy raises, if a result is no action or cannot be obeyed, or if the
            search would go on with nothing left to do.
    """
    name = f"strategy {policy_name(strategy)}, round {tree.rounds}"
    answer = call_policy(name, strategy.select, tree, rng)
    if not isinstance(answer, Iterable) or isinstance(answer, str):
        raise PolicyError(f"{name}: select returned {_describe(answer)}, not a list of actions")
    actions = list(answer)
    judged: set[Node] = set()
    for action in actions:
        if not isinstance(action, _ACTIONS):
            kinds = ", ".join(kind.__name__ for kind in _ACTIONS)
            raise PolicyError(f"{name}: {_describe(action)} is not an action ({kinds})")
        if not isinstance(action, EndSearch) and not _begins_prompt(action):
            problem = "decides twice about" if action.node in judged else _why_not(action, tree)
            if problem:
                raise PolicyError(f"{name}: {problem} {_describe(action.node)}")
            judged.add(action.node)
    if not any(isinstance(action, Extend | Ask | EndSearch) for action in actions):
        num_waiting = len(tree.candidates())
        raise PolicyError(
            f"{name}: neither extends a path nor ends the search, so {num_waiting} "
            "candidates would wait forever"
        )
    return actions


def collect_prospects(
    strategy: Strategy, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
) -> list[Prospect]:
    """Return the checked prospects of a strategy: the steps that it will probably extend.

    Empty if the strategy is no `Foresees`.

    beams: the steps of the current round. ahead: speculative children with a decoded step.

    Raises:
        PolicyError: if the strategy raises, or a result is no prospect of an unended step of this
            tree.
    """
    if not isinstance(strategy, Foresees):
        return []
    name = f"strategy {policy_name(strategy)}, round {tree.rounds + 1}"
    prospects = list(call_policy(name, strategy.prospects, tree, beams, ahead))
    for prospect in prospects:
        if not isinstance(prospect, Prospect):
            raise PolicyError(f"{name}: {_describe(prospect)} is not a Prospect")
        if problem := _why_not(Extend(prospect.node, prospect.children), tree):
            raise PolicyError(f"{name}: a prospect {problem} {_describe(prospect.node)}")
    return prospects


def make_plan(schedule: SchedulePolicy, view: ScheduleView) -> Plan:
    """Call a schedule, and return its checked plan without empty groups.

    Raises:
        PolicyError: if the schedule raises, or if its groups are all empty, repeat a beam, or
            contain a node that is not a beam of the view.
    """
    name = f"schedule {policy_name(schedule)}"
    plan = call_policy(name, schedule.plan, view)
    if not isinstance(plan, Plan):
        raise PolicyError(f"{name}: plan returned {_describe(plan)}, not a Plan")
    groups = tuple(tuple(group) for group in plan.groups if group)
    known, seen = set(view.beams), set()
    for beam in (beam for group in groups for beam in group):
        if beam not in known:
            raise PolicyError(f"{name}: {_describe(beam)} in a group is not a waiting beam")
        if beam in seen:
            raise PolicyError(f"{name}: {_describe(beam)} is in two groups, or twice in one")
        seen.add(beam)
    if not groups and view.beams:
        raise PolicyError(f"{name}: the plan is empty, but {len(view.beams)} beams wait")
    return replace(plan, groups=groups)


def policy_name(policy: Any) -> str:
    """Return a policy's name for messages: its declared name, or its class."""
    chosen = getattr(getattr(policy, "search", None), "search", None)
    name = chosen or getattr(policy, "name", None)
    return name if isinstance(name, str) else type(policy).__name__


def call_policy(name: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of a user's policy, and return its result.

    Raises:
        PolicyError: if the method raises any error but a `BeamwrightError`.
    """
    try:
        return method(*arguments)
    except BeamwrightError:
        raise
    except Exception as error:
        raise PolicyError(f"{name}: it raised {error_line(error)}") from error


def store_answers(way: Answers, nodes: Iterable[Node]) -> None:
    """Read the answers that ended replies state, and store them on their nodes.

    way: the answer format: it reads an answer from a reply, and makes the key by which equal
        answers vote together.

    Raises:
        PolicyError: if a plugin raises, or returns no text.
    """
    name = f"answers {type(way).__name__}"
    for node in nodes:
        if node.vote is not None:
            continue
        answer, vote = call_policy(name, way.read, node.said), None
        if isinstance(answer, str) and answer.strip():
            vote = call_policy(name, way.key, answer, node.notes_of_reply)
        if not isinstance(answer, str | None) or not isinstance(vote, str | None):
            raise PolicyError(f"{name}: {_describe(answer)} and {_describe(vote)} must be texts")
        node.answer, node.vote = answer, vote


def _begins_prompt(action: Extend | Ask | Prune | FinishPath) -> bool:
    """Return True for a prompt of its own, which a round may start any number of times."""
    node: Any = action.node
    alone = isinstance(action, Ask) and action.turn.alone
    return alone and isinstance(node, Node) and node.parent is None


def _why_not(action: Extend | Ask | Prune | FinishPath, tree: SearchTree) -> str | None:
    """Return why an action is invalid, as words that precede the node; None if it is valid."""
    node: Any = action.node
    if not isinstance(node, Node) or node.root is not tree.root:
        return "acts on a value that is not a node of this tree:"
    waits = node.state is NodeState.CANDIDATE
    why: str | None = None
    match action:
        case Extend(children=children) if type(children) is not int or children < 1:
            why = f"gives {_describe(children)} children to"
        case Extend() if node.ended:
            why = "extends a path that has ended:"
        case Extend() if not waits and node.state is not NodeState.KEPT:
            why = f"extends a node that is {node.state}:"
        case Ask() if not (waits and node.ended):
            why = "asks about a node that is not an ended candidate:"
        case FinishPath() if not waits:
            why = f"finishes a node that is {node.state}:"
        case Prune() if node.parent is None or node.state is NodeState.OPEN:
            why = "prunes a node that is not decoded:"
    return why


def _describe(value: Any) -> str:
    if isinstance(value, Node):
        return f"path {'.'.join(map(str, value.lineage))}"
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."


# --- early stops ------------------------------------------------------------------------------


def check_stops(
    settings: StopSettings, search: SearchSettings, *, probabilities: bool | None = None
) -> None:
    """Check that options that stop by votes fit the other options of a search.

    search: settings with `choose` (how the answer is chosen) filled in.
    probabilities: True if scores lie between 0 and 1; None if that is not known yet.

    Raises:
        InputError: if the vote cannot be decided early; the message says which --choose would work.
    """
    votes, sure = settings.stop_votes, settings.stop_confidence is not None
    choose, votes_change = search.choose, strategy_entry(search).votes_change
    why: str | None = None
    if votes and votes_change is not None:
        why = f"--stop-votes does not work with --search {search.search}: {votes_change}"
    elif sure and choose != "majority":
        why = f"--stop-confidence needs --choose majority, not {choose}"
    elif sure and not (search.model_extra or {}).get("wave"):
        why = "--stop-confidence needs --wave, because it is checked between waves"
    elif votes and choose not in ("majority", "weighted"):
        why = f"--stop-votes needs --choose majority or weighted; with {choose} "
        why += "any candidate may still be the best"
    elif votes and choose == "weighted" and probabilities is False:
        why = "--stop-votes with --choose weighted needs a verifier whose scores are "
        why += "probabilities; use --choose majority"
    if why is not None:
        raise InputError(why)


class StopRule:
    """Rule that stops one search early: by votes, first k, tokens, deadline, or user functions.

    search: the number of candidates, whether equal texts count once, and how the answer is chosen,
        which defines the vote.
    functions: the user's stop functions, called after all other stops.
    deadline: the reason that is reported when the deadline has passed.
    """

    def __init__(
        self, settings: StopSettings, search: SearchSettings, functions: Sequence[StopFunction] = ()
    ) -> None:
        self._settings, self._search, self._n = settings, search, search.n
        self._row, self._functions = strategy_entry(search), functions
        self.deadline = f"--deadline {settings.deadline or 0:g}s had passed"
        self._sure = f"the vote was clear (--stop-confidence {settings.stop_confidence})"
        self._first = f"the first {settings.first_k} had finished (--first-k)"
        self._spent = f"--token-budget {settings.token_budget} was spent"

    @property
    def paths_stand_alone(self) -> bool:
        """True if the strategy decides about each path alone, so it can select in half a round."""
        return not self._row.competes

    def is_reproducible(self, why: str) -> bool:
        """Return True if a stop for the reason `why` would happen in every run of the search."""
        return why in (_SETTLED, self._spent, self._first, self._sure)

    def is_out_of_time(self, elapsed_s: float) -> bool:
        """Return True if the deadline has passed."""
        return self._settings.deadline is not None and elapsed_s >= self._settings.deadline

    def find_reason(
        self,
        tree: SearchTree,
        elapsed_s: float,
        actions: Sequence[Action] = (),
        *,
        cut: bool = False,
    ) -> str | None:
        """Return the reason to stop this tree, whose candidates are scored; None to go on.

        elapsed_s: seconds since the search started or was resumed.
        actions: the strategy's actions of this round; paths that they prune for good do not count.
        cut: True if the deadline cut the round. If False, no search stops while rollouts of a
            lookahead run, because rollouts are no candidates.
        """
        if not cut and any(node.greedy for node in tree.candidates()):
            return None
        settings, candidates = self._settings, self._candidates(tree, actions)
        ended = [n for n in (*tree.finished(), *candidates) if n.ended and n.answers]
        if settings.stop_votes:
            voters = ended
            if self._row.finals is not None:  # the strategy names the voters, such as the first n
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
        return self.deadline if self.is_out_of_time(elapsed_s) else self._ask_functions(tree)

    def _is_clear(self, ended: Sequence[Node], candidates: Sequence[Node]) -> bool:
        """Return True if the leading answer is confident enough (`--stop-confidence`).

        This is tested only between two waves of paths, because paths that end first may agree more
        often.
        """
        sure = self._settings.stop_confidence
        whole = len(ended) < self._n and all(node.ended for node in candidates)
        return sure is not None and whole and lead_confidence(ended) >= sure

    def _ask_functions(self, tree: SearchTree) -> str | None:
        """Call the user's stop functions; return the first reason that one gives, or None."""
        for stop in self._functions:
            name = f"stop {getattr(stop, '__name__', type(stop).__name__)}"
            why: Any = call_policy(name, stop, tree)
            if isinstance(why, str):
                return why
            if why is not None:
                raise PolicyError(f"{name}: it returned {type(why).__name__}, not a reason or None")
        return None

    def make_ending(
        self, tree: SearchTree, why: str, actions: Sequence[Action] = ()
    ) -> list[Action]:
        """Return the actions that end the search for the reason `why`.

        Ended paths become final candidates. The best-scored other paths fill the remaining places
        as unfinished candidates.
        """
        kept, given_up = self._candidates(tree, actions), self._pruned_alone(actions)
        out = {node for node in given_up if node.state is NodeState.FINISHED}
        places = self._n - len(tree.finished()) - len(given_up - out)
        if not self._row.competes:  # as in best-of-n: the place of a pruned path stays taken
            places -= sum(node.state is NodeState.PRUNED for node in tree.nodes())
        ended = [node for node in kept if node.ended]
        if self._row.finals is None:
            ended = sort_by_rank(ended)[:places]
        left = max(0, places - len(ended))
        shown = max(0, left - len(unfinished_paths(tree)))
        unfinished = sort_by_rank(node for node in kept if not node.ended)[:shown]
        staying = {*ended, *unfinished}
        dropped = [
            node
            for leaf in tree.candidates()
            if leaf not in staying
            for node in rollout_steps(leaf) or [leaf]
        ]
        reason = f"{left} of {self._n} paths were unfinished when {why}" if left else None
        lost = [node for node in tree.finished() if node in out]
        return [*map(Prune, [*lost, *dropped]), *map(FinishPath, ended), EndSearch(reason)]

    def _pruned_alone(self, actions: Sequence[Action]) -> set[Node]:
        """Return the paths that `actions` prune, if the strategy judges each path alone; else none.

        These paths stay pruned when the search stops early.
        """
        if self._row.competes:
            return set()
        return {action.node for action in actions if isinstance(action, Prune)}

    def _candidates(self, tree: SearchTree, actions: Sequence[Action]) -> list[Node]:
        """Return the candidates that count: no rollouts, dropped paths or filtered duplicates."""
        candidates = [node for node in tree.candidates() if not node.greedy]
        dropped: Iterable[Node] = self._pruned_alone(actions)
        if self._search.filter_duplicates and self._row.competes:
            dropped = find_duplicates(candidates, self._search.width if self._row.apart else None)
        return [node for node in candidates if node not in dropped]


def unfinished_paths(tree: SearchTree) -> list[Node]:
    """Return the paths whose next step was not decoded before a deadline cut the round."""
    return list(
        dict.fromkeys(rollout_start(node) for node in tree.nodes() if _lacks_next_step(node))
    )


def _lacks_next_step(node: Node) -> bool:
    """Return True if a kept node has children, but none of them is decoded.

    Rollouts (greedy children) that were pruned count as not decoded.
    """
    if node.parent is None or node.state is not NodeState.KEPT or not node.children:
        return False
    drawn = [child for child in node.children if not child.greedy]
    if drawn:
        return all(child.state is NodeState.OPEN for child in drawn)
    return all(child.state in (NodeState.OPEN, NodeState.PRUNED) for child in node.children)


def vote_is_settled(ended: Iterable[Node], num_remaining: int, *, weighted: bool = False) -> bool:
    """Return True if the leading answer wins the vote, whatever the remaining candidates answer.

    Voters are the same as in `search.choose`: paths that ended by themselves and state an answer.
    False if a tie is possible, because scores could then decide for the other answer.

    num_remaining: number of candidates that may still vote.
    weighted: votes are sums of scores. Scores must be probabilities, so that a remaining candidate
        adds at most 1 to an answer.
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
    """Return the probability that the leading answer is truly more frequent than the second.

    The leader's share among the two is Beta-distributed by their votes. This is the stop of
    Adaptive-Consistency (Aggarwal et al. 2023).
    """
    votes = [node.vote for node in ended if node.complete and node.vote is not None]
    first, second = (*(count for _, count in Counter(votes).most_common(2)), 0, 0)[:2]
    total = first + second + 1
    return sum(math.comb(total, k) for k in range(first + 1)) / 2.0**total if first else 0.0


def num_generated(tree: SearchTree) -> int:
    """Return the number of tokens of all decoded steps, pruned ones included."""
    return sum(
        len(node.token_ids)
        for node in tree.nodes()
        if node.parent is not None and node.turn is None and node.state is not NodeState.OPEN
    )

"""What a strategy or a schedule asks for is checked before the loop does it, whoever wrote it.

A policy that would hang the loop, or be half obeyed, ends the search with an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from beamwright.errors import BeamwrightError, PolicyError
from beamwright.protocols import (
    Action,
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
from beamwright.tree import Node, NodeState, SearchTree

_ACTIONS = (Extend, Ask, Prune, Complete, Finish)


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
        problem = _wrong_extension(prospect.node, prospect.children)
        if prospect.node.root is not tree.root:
            problem = problem or "what is no node of this tree:"
        if problem:
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
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise PolicyError(f"{name}: it raised {line}") from error


def _wrong(action: Extend | Ask | Prune | Complete, tree: SearchTree) -> str | None:
    """Why an action cannot be obeyed; None if it can."""
    node = action.node
    if not isinstance(node, Node) or node.root is not tree.root:
        return "acts on what is no node of this tree:"
    match action:
        case Extend():
            return _wrong_extension(node, action.children)
        case Ask() if node.state is not NodeState.CANDIDATE or not node.ended:
            return "asks about what is no ended candidate:"
        case Complete() if node.state is not NodeState.CANDIDATE:
            return f"completes a node that is {node.state}:"
        case Prune() if node.parent is None or node.state is NodeState.OPEN:
            return "prunes what is not decoded:"
    return None


def _wrong_extension(node: Node, children: int) -> str | None:
    if type(children) is not int or children < 1:
        return f"gives {_shown(children)} children to"
    if node.ended:
        return "extends a path that has ended:"
    if node.state not in (NodeState.CANDIDATE, NodeState.KEPT):
        return f"extends a node that is {node.state}:"
    return None


def _shown(value: Any) -> str:
    if isinstance(value, Node):
        return f"path {'.'.join(map(str, value.lineage))}"
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."

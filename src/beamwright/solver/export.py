"""Training data from a search tree: a row per step, with rewards and advantages.

`Solution.export` returns them. A row's columns have the names that TRL's
trainers read: `input_ids` and `completion_mask`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beamwright.protocols import SAMPLING_MASS
from beamwright.tree import Node, NodeState, SearchTree

Reward = Callable[[Node], float | None]  # the reward of a path, from its last step


def export_steps(tree: SearchTree, temperature: float, reward: Reward) -> list[dict[str, Any]]:
    """Return one row for each decoded step of a tree, parents first; pruned steps included.

    A step's value is the mean reward of the paths that contain it, and its advantage is its value
    minus the value of its parent.

    temperature: the sampling temperature; 0 is greedy.
    reward: paths without a reward do not count.
    """
    steps = [node for node in tree.nodes() if node.turn is None and _is_decoded(node)]
    values = _values(tree, reward)
    return [_row(node, temperature, values) for node in steps]


def _is_decoded(node: Node) -> bool:
    return node.parent is not None and node.state is not NodeState.OPEN


def _values(tree: SearchTree, reward: Reward) -> dict[Node, float | None]:
    """Return the mean reward of the paths through each node; None without a reward."""
    sums: dict[Node, tuple[float, int]] = {}
    for node in reversed([*tree.nodes()]):  # children first
        total, count = sums.get(node, (0.0, 0))
        below = [child for child in node.children if _is_decoded(child)]
        if not below and node.turn is None and (own := reward(node)) is not None:
            total, count = own, 1
        sums[node] = total, count
        if node.parent is not None:
            above = sums.get(node.parent, (0.0, 0))
            sums[node.parent] = above[0] + total, above[1] + count
    return {node: total / count if count else None for node, (total, count) in sums.items()}


def _row(node: Node, temperature: float, values: dict[Node, float | None]) -> dict[str, Any]:
    assert node.parent is not None
    value, above = values[node], values[node.parent]
    prompt = node.parent.path_token_ids()
    return {
        "problem_id": node.problem_id,
        "step": ".".join(map(str, node.lineage[1:])),
        "parent": ".".join(map(str, node.parent.lineage[1:])),
        "input_ids": [*prompt, *node.token_ids],
        "completion_mask": [0] * len(prompt) + [1] * len(node.token_ids),
        "logprobs": list(node.logprobs),
        "sampled_logprobs": _sampled(node, temperature),
        "text": node.step_text,
        "stop": None if node.stop is None else str(node.stop),
        "pruned": node.state is NodeState.PRUNED,
        "step_score": node.step_score,
        "reward": value,
        "advantage": None if value is None or above is None else value - above,
    }


def _sampled(node: Node, temperature: float) -> list[float] | None:
    """Return the tokens' log-probabilities under the distribution that they were drawn from."""
    if node.greedy or not temperature:
        return [0.0] * len(node.token_ids)
    if (masses := node.stats.get(SAMPLING_MASS)) is None:
        return None
    pairs = zip(node.logprobs, masses, strict=True)
    return [logprob / temperature - mass for logprob, mass in pairs]

"""A checkpoint: the whole tree of a search after a round, to go on from in another process.

Knows tokens, texts, scores, states, what was spent, and the settings that decide the tree; no KV
and no models. The file is JSON with a checksum: `solve --checkpoint` replaces it after every
round, at the moment when the round is scored and nothing is decided about it yet, so no node is
open in it. A process killed at any moment leaves one whole checkpoint, the last.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.files import read_regular, write_whole
from beamwright.identity import CODE, plugin_code
from beamwright.runtime import Accounting, TreeRun
from beamwright.tree import Node, NodeState, SearchTree, StopReason, Turn

FORMAT = "beamwright checkpoint"
VERSION = 3
OWN = "python:"  # begins the name of what a user gave as an object
DECISIVE_SECTIONS = ("model", "sampling", "step", "search", "sparse")  # decide the tree
# Of these sections:
_NOT_THE_TREE = {"device", "attention", "top_logprobs", "choose", "sparse_home", "sparse_rank"}


@dataclass(frozen=True)
class Checkpoint:
    """A search between two rounds.

    settings: what decides the tree (`tree_settings`). elapsed_s: spent so far, all processes
    together; phases_s: of which, by phase. num_groups, round_tokens, finished_s: as in
    `Accounting` and `TreeRun`.
    """

    settings: Mapping[str, Any]
    tree: SearchTree
    elapsed_s: float
    phases_s: Mapping[str, float]
    num_groups: int
    round_tokens: Sequence[int]
    finished_s: Mapping[Node, float]

    def check_settings(self, file: Path, wanted: Mapping[str, Any]) -> None:
        """Raises InputError that names the first option that was another when `file` was saved."""
        for code, option in CODE.items():
            named = self.settings.get(option)
            if code in self.settings and code not in wanted and named == wanted.get(option):
                raise InputError(
                    f"{file}: was saved with --{option} {named} of a plugin, which is not loaded "
                    "here (--plugin)"
                )
        for option in dict.fromkeys([*wanted, *self.settings]):
            was, now = self.settings.get(option), wanted.get(option)
            if was != now:
                name = f"--{option.replace('_', '-')}"
                raise InputError(f"{file}: was saved with {name} {_shown(was)}, not {_shown(now)}")

    def progress(self, run: TreeRun) -> Accounting:
        """Tell a run how far it is; its clocks."""
        run.elapsed_s, run.finished_s = self.elapsed_s, dict(self.finished_s)
        run.round_tokens.extend(self.round_tokens)
        accounting = Accounting()
        accounting.seconds.update(self.phases_s)
        accounting.num_groups = self.num_groups
        return accounting


def tree_settings(
    settings: Settings, dtype: str, owners: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The settings that a tree depends on, by option.

    dtype: the precision that `auto` stands for. owners: who decides in the place of what an option
    names, by option (`identity_of`). Where and in which order things are computed is
    left out: it changes the time, and in float32 the last bits (docs/architecture.md, "Sameness").
    """
    chosen = settings.model_dump(mode="json", include=set(DECISIVE_SECTIONS))
    found = {
        option: value
        for section in chosen.values()
        for option, value in section.items()
        if option not in _NOT_THE_TREE and value != []  # what nobody asked for
    }
    return {**found, **plugin_code(settings), "dtype": dtype, **(owners or {})}


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value) if isinstance(value, str) else str(value)


# --- writing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointWriter:
    """Saves one search to one file: the `save` of a `TreeRun`.

    spent: what has been measured of the search so far.
    """

    file: Path
    settings: Mapping[str, Any]
    spent: Callable[[], Accounting]

    def __call__(self, run: TreeRun, elapsed_s: float) -> None:
        """Raises InputError if the file cannot be written."""
        spent = self.spent()
        saved = Checkpoint(
            settings=self.settings,
            tree=run.tree,
            elapsed_s=elapsed_s,
            phases_s=spent.seconds,
            num_groups=spent.num_groups,
            round_tokens=run.round_tokens,
            finished_s=run.finished_s,
        )
        write_checkpoint(self.file, saved)


def write_checkpoint(file: Path, checkpoint: Checkpoint) -> None:
    """Replace the file as a whole; it is on the disk when this returns.

    Raises:
        InputError: if the file cannot be written.
    """
    content = _dumps(_body(checkpoint))
    head = json.dumps({"format": FORMAT, "version": VERSION, "sha256": _digest(content)})
    if file.exists() and not file.is_file():
        raise InputError(f"--checkpoint {file}: not a regular file; it could not be resumed from")
    write_whole(file, f'{head[:-1]}, "search": {content}}}\n', option="--checkpoint ")


def _body(checkpoint: Checkpoint) -> dict[str, Any]:
    tree = checkpoint.tree
    return {
        "settings": checkpoint.settings,
        "problem_id": tree.root.problem_id,
        "problem": tree.root.problem_text,
        "prompt_ids": tree.root.token_ids,
        "root_usage": tree.root.usage,
        "rounds": tree.rounds,
        "round_tokens": checkpoint.round_tokens,
        "elapsed_s": checkpoint.elapsed_s,
        "phases_s": checkpoint.phases_s,
        "num_groups": checkpoint.num_groups,
        "nodes": [
            _node(node, checkpoint.finished_s.get(node))
            for node in tree.nodes()
            if node.parent is not None
        ],
    }


def _node(node: Node, finished_s: float | None) -> dict[str, Any]:
    assert node.parent is not None
    top = [[(token, _number(value)) for token, value in each] for each in node.top]
    # A letter of several bytes may end in the next step: a path's text need not go on its parent's.
    shared = _shared(node.parent.text, node.text)
    return {
        "lineage": node.lineage[1:],
        "state": str(node.state),
        "stop": str(node.stop),
        "token_ids": node.token_ids,
        "logprobs": [_number(value) for value in node.logprobs],
        "stats": {name: [_number(v) for v in values] for name, values in node.stats.items()},
        **({"top": top} if top else {}),
        "shared_text": shared,
        "text": node.text[shared:],
        "step_score": _number(node.step_score),
        "score": _number(node.score),
        "usage": node.usage,
        "notes": node.notes,
        "round": node.round,
        "greedy": node.greedy,
        "turn": None if node.turn is None else asdict(node.turn),
        "finished_s": finished_s,
    }


def _shared(left: str, right: str) -> int:
    """Characters that two texts begin with alike."""
    if right.startswith(left):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _number(value: float | None) -> float | str | None:
    """JSON has no name for what is not finite."""
    return value if value is None or math.isfinite(value) else str(value)


def _dumps(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode("ascii")).hexdigest()


# --- reading ---------------------------------------------------------------------------------


def read_checkpoint(file: Path) -> Checkpoint:
    """Read a checkpoint and build its tree again; no node has KV yet.

    Raises:
        InputError: if the file cannot be read, is no checkpoint, or is damaged; says which.
    """
    try:
        content = json.loads(read_regular(file))
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"--resume {file}: cannot be read ({reason})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--resume {file}: not a checkpoint, or a damaged one") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"--resume {file}: not a checkpoint")
    if content.get("version") != VERSION:
        raise InputError(
            f"--resume {file}: a checkpoint of version {content.get('version')!r}; "
            f"this program reads version {VERSION}"
        )
    try:
        if _digest(_dumps(content["search"])) != content["sha256"]:
            raise InputError(f"--resume {file}: the checkpoint is damaged (checksum)")
        return _parse(content["search"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise InputError(f"--resume {file}: the checkpoint is damaged ({what})") from error


def _parse(body: Mapping[str, Any]) -> Checkpoint:
    tree = SearchTree(body["problem_id"], tuple(body["prompt_ids"]), body["problem"])
    tree.rounds, tree.root.usage = body["rounds"], Counter(body["root_usage"])
    finished_s: dict[Node, float] = {}
    by_lineage: dict[tuple[int, ...], Node] = {(): tree.root}
    parents = {tuple(content["lineage"][:-1]) for content in body["nodes"]}
    for content in body["nodes"]:
        lineage = tuple(content["lineage"])
        node = _add(tree, by_lineage[lineage[:-1]], content, has_children=lineage in parents)
        if node.lineage[1:] != lineage:
            raise ValueError(f"node {lineage} is out of order")
        by_lineage[lineage] = node
        if content["finished_s"] is not None:
            finished_s[node] = content["finished_s"]
    pruned = [by_lineage[tuple(c["lineage"])] for c in body["nodes"] if c["state"] == "pruned"]
    for node in reversed(pruned):  # children first
        tree.prune(node)
    return Checkpoint(
        settings=body["settings"],
        tree=tree,
        elapsed_s=body["elapsed_s"],
        phases_s=body["phases_s"],
        num_groups=body["num_groups"],
        round_tokens=tuple(body["round_tokens"]),
        finished_s=finished_s,
    )


def _add(tree: SearchTree, parent: Node, content: Mapping[str, Any], *, has_children: bool) -> Node:
    """A decoded step, in the state in which it was saved; pruned ones are not pruned yet."""
    if content["turn"] is not None:
        asked = tree.ask(parent, Turn(**content["turn"]), tuple(content["token_ids"]))
        asked.round, asked.usage = content["round"], Counter(content["usage"])
        return asked
    (node,) = tree.expand(parent, 1, greedy=content["greedy"])
    node.round = content["round"]
    text = parent.text[: content["shared_text"]] + content["text"]
    logprobs = tuple(float(value) for value in content["logprobs"])
    stats = {name: tuple(map(float, values)) for name, values in content["stats"].items()}
    stop = StopReason(content["stop"])
    top = tuple(tuple((i, float(p)) for i, p in each) for each in content.get("top", ()))
    tree.commit(node, tuple(content["token_ids"]), logprobs, stop, text, stats, top)
    node.step_score, node.score = _float(content["step_score"]), _float(content["score"])
    node.usage = Counter(content["usage"])
    node.notes = dict(content.get("notes", {}))  # files need not have them
    match NodeState(content["state"]):
        case NodeState.KEPT:
            tree.keep(node)
        case NodeState.PRUNED if has_children:
            tree.keep(node)  # for the time being
        case NodeState.FINISHED:
            tree.finish(node)
        case NodeState.OPEN:
            raise ValueError(f"{node!r} was not decoded")
    return node


def _float(value: float | str | None) -> float | None:
    return None if value is None else float(value)

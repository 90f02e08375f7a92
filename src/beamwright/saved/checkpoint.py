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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf, Strict, TypeAdapter, ValidationError

from beamwright.config import Settings
from beamwright.counters import PHASES, Counters
from beamwright.declare import VERIFIERS
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import InputError
from beamwright.identity import CODE, plugin_code
from beamwright.io import read_regular, write_whole
from beamwright.registry import PLUGIN_MODULE, Table
from beamwright.saved.recorded import describe_fault
from beamwright.search import STRATEGIES
from beamwright.tree import Node, NodeState, SearchTree, StopReason, Turn

FORMAT = "beamwright checkpoint"
VERSION = 3
ENDED = "ended"  # of a search that is over: what `CheckpointWriter.end` was told
OWN = "python:"  # begins the name of what a user gave as an object
DECISIVE_SECTIONS = ("model", "sampling", "step", "search", "sparse")  # decide the tree
# Of these sections:
_NOT_THE_TREE = {"device", "attention", "top_logprobs", "choose", "sparse_home"}


@dataclass(frozen=True)
class Checkpoint:
    """A search between two rounds.

    settings: what decides the tree (`tree_settings`). elapsed_s: spent so far, all processes
    together; phases_s: of which, by phase. num_groups, round_tokens, finished_s: as in
    `TreeRun`.
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
        self.check_plugins(file)
        for option in dict.fromkeys([*wanted, *self.settings]):
            was, now = self.settings.get(option), wanted.get(option)
            if was != now:
                name = f"--{option.replace('_', '-')}"
                raise InputError(f"{file}: was saved with {name} {_shown(was)}, not {_shown(now)}")

    def check_plugins(self, file: Path) -> None:
        """Raises InputError that names the plugin of `file` that is not loaded here."""
        tables: tuple[Table[Any], ...] = (STRATEGIES, VERIFIERS)
        for (code, option), table in zip(CODE.items(), tables, strict=True):
            if code in self.settings and str(self.settings.get(option)) not in table:
                owner = str(self.settings[code]).partition("@")[0].removeprefix(PLUGIN_MODULE)
                raise InputError(
                    f"{file}: was saved with --{option} {self.settings.get(option)} of the plugin "
                    f"{owner}, which is not loaded here (--plugin)"
                )

    def progress(self, run: TreeRun) -> Counters:
        """Tell a run how far it is; what it has taken."""
        run.elapsed_s, run.finished_s = self.elapsed_s, dict(self.finished_s)
        run.round_tokens.extend(self.round_tokens)
        known: dict[str, Any] = {f"{phase}_s": self.phases_s.get(phase, 0.0) for phase in PHASES}
        return Counters(groups=self.num_groups, **known)


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


@dataclass
class CheckpointWriter:
    """Saves one search to one file: the `save` of a `TreeRun`.

    spent: what has been measured of the search so far. saved: the file is of this search.
    """

    file: Path
    settings: Mapping[str, Any]
    spent: Callable[[], Counters]
    saved: bool = False

    def __call__(self, run: TreeRun, elapsed_s: float) -> None:
        """Raises InputError if the file cannot be written."""
        spent, tree, settings = self.spent(), run.tree, self.settings
        known = elapsed_s, spent.seconds, spent.groups, run.round_tokens, run.finished_s
        write_checkpoint(self.file, Checkpoint(settings, tree, *known))
        self.saved = True

    def end(self, **known: Any) -> None:
        """Add how the search has ended, for who looks at the file: nobody resumes from that.

        Its answer stands, whatever has become of the file.
        """
        if not self.saved:
            return
        with suppress(OSError, ValueError, InputError):
            content = {**json.loads(read_regular(self.file)), ENDED: known}
            write_whole(self.file, json.dumps(content) + "\n", option="--checkpoint ")


def write_checkpoint(file: Path, checkpoint: Checkpoint) -> None:
    """Replace the file as a whole; it is on the disk when this returns.

    Raises:
        InputError: if the file cannot be written.
    """
    content, digest = _digested(_body(checkpoint))
    head = json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest})
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


def _digested(body: Any) -> tuple[str, str]:
    """It as JSON, and the checksum of that."""
    content = json.dumps(body, separators=(",", ":"), allow_nan=False)
    return content, hashlib.sha256(content.encode("ascii")).hexdigest()


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
        if _digested(content["search"])[1] != content["sha256"]:
            raise InputError(f"--resume {file}: the checkpoint is damaged (checksum)")
        return _tree_of(_SEARCH.validate_python(content["search"]))
    except ValidationError as error:
        what = describe_fault(error)
    except (KeyError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
    raise InputError(f"--resume {file}: the checkpoint is damaged ({what})")


_Count = Annotated[int, Strict(), Field(ge=0, lt=1 << 53)]
_Spent = Annotated[int, Strict(), Field(gt=-(1 << 53), lt=1 << 53)]  # what is taken back is below 0
_Finite = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_Seconds = Annotated[_Finite, Field(ge=0)]
_Number = _Finite | Literal["nan", "inf", "-inf"]
_Tokens = tuple[_Count, ...]
_Text = InstanceOf[str]  # with halves of surrogate pairs, too


@dataclass(frozen=True)
class _SavedTurn:
    text: _Text
    answers: Annotated[bool, Strict()]


@dataclass(frozen=True)
class _SavedNode:
    """What `_node` writes."""

    lineage: Annotated[tuple[_Count, ...], Field(min_length=1)]
    state: NodeState
    stop: StopReason | Literal["None"]
    token_ids: _Tokens
    logprobs: tuple[_Number, ...]
    stats: dict[str, tuple[_Number, ...]]
    shared_text: _Count
    text: _Text
    step_score: _Number | None
    score: _Number | None
    usage: dict[str, _Spent]
    round: _Count
    greedy: Annotated[bool, Strict()]
    turn: _SavedTurn | None
    finished_s: _Seconds | None
    top: tuple[tuple[tuple[_Count, _Number], ...], ...] = ()
    notes: dict[str, _Text] = field(default_factory=dict)  # files need not have them


@dataclass(frozen=True)
class _SavedSearch:
    """What `_body` writes."""

    settings: dict[str, Any]
    problem_id: Annotated[int, Strict()] | _Text
    problem: _Text
    prompt_ids: Annotated[_Tokens, Field(min_length=1)]
    root_usage: dict[str, _Spent]
    rounds: _Count
    round_tokens: tuple[_Count, ...]
    elapsed_s: _Seconds
    phases_s: dict[str, _Finite]
    num_groups: _Count
    nodes: tuple[_SavedNode, ...]


_SEARCH = TypeAdapter(_SavedSearch)


def _tree_of(saved: _SavedSearch) -> Checkpoint:
    tree = SearchTree(saved.problem_id, saved.prompt_ids, saved.problem)
    tree.rounds, tree.root.usage = saved.rounds, Counter(saved.root_usage)
    if saved.rounds != max((each.round for each in saved.nodes), default=0):
        raise ValueError(f"rounds is {saved.rounds}, which is not the last node's round")
    finished_s: dict[Node, float] = {}
    by_lineage: dict[tuple[int, ...], Node] = {(): tree.root}
    parents = {each.lineage[:-1] for each in saved.nodes}
    for each in saved.nodes:
        parent = by_lineage[each.lineage[:-1]]
        node = _add(tree, parent, each, has_children=each.lineage in parents)
        if node.lineage[1:] != each.lineage:
            raise ValueError(f"node {each.lineage} is out of order")
        by_lineage[each.lineage] = node
        if each.finished_s is not None:
            finished_s[node] = each.finished_s
    pruned = [by_lineage[each.lineage] for each in saved.nodes if each.state is NodeState.PRUNED]
    for node in reversed(pruned):  # children first
        tree.prune(node)
    known = saved.elapsed_s, saved.phases_s, saved.num_groups, saved.round_tokens, finished_s
    return Checkpoint(saved.settings, tree, *known)


def _add(tree: SearchTree, parent: Node, saved: _SavedNode, *, has_children: bool) -> Node:
    """A decoded step, in the state in which it was saved; pruned ones are not pruned yet."""
    if saved.turn is not None:
        asked = tree.ask(parent, Turn(saved.turn.text, saved.turn.answers), saved.token_ids)
        asked.round, asked.usage = saved.round, Counter(saved.usage)
        return asked
    (node,) = tree.expand(parent, 1, greedy=saved.greedy)
    node.round = saved.round
    text = parent.text[: saved.shared_text] + saved.text
    logprobs = tuple(map(float, saved.logprobs))
    stats = {name: tuple(map(float, values)) for name, values in saved.stats.items()}
    top = tuple(tuple((i, float(p)) for i, p in each) for each in saved.top)
    tree.commit(node, saved.token_ids, logprobs, StopReason(saved.stop), text, stats, top)
    node.step_score, node.score = _float(saved.step_score), _float(saved.score)
    node.usage, node.notes = Counter(saved.usage), dict(saved.notes)
    match saved.state:
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

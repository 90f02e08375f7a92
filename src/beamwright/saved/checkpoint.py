"""A checkpoint: the whole tree of a search after a round, to go on from in another process.

Knows tokens, texts, scores, states, what was spent, and the settings that decide the tree; no KV
and no models. The file is JSON with a checksum: `solve --checkpoint` replaces it after every
round, at the moment when the round is scored and nothing is decided about it yet, so no node is
open in it. A process killed at any moment leaves one whole checkpoint, the last. What a search is
resumed with is known from it before any model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os.path
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf, Strict, TypeAdapter, ValidationError

from beamwright.config import Settings
from beamwright.declare import VERIFIERS
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import InputError
from beamwright.io import describe_fault, read_object, write_whole
from beamwright.models.hf_config import find_shape
from beamwright.models.load import precision
from beamwright.registry import PLUGIN_MODULE, Table, flag_of
from beamwright.saved.identity import CODE, plugin_code
from beamwright.search import STRATEGIES
from beamwright.search.answers import ANSWERS
from beamwright.search.defaults import with_defaults
from beamwright.tree import Node, NodeState, SearchTree, StopReason, Turn

FORMAT = "beamwright checkpoint"
VERSION = 4
ENDED = "ended"  # of a search that is over: what `CheckpointWriter.end` was told
OWN = "python:"  # begins the name of what a user gave as an object
DECISIVE_SECTIONS = ("model", "sampling", "step", "search", "sparse")  # decide the tree
_TABLES: dict[str, Table[Any]] = {"search": STRATEGIES, "verifier": VERIFIERS, "answers": ANSWERS}
# Of these sections:
_NOT_THE_TREE = {"device", "attention", "top_logprobs", "choose", "sparse_home"}
# Options that older files lack, and what those then had.
_LATER = {
    "kv_dtype": "auto", "verify_every": 1, "thinking": "auto", "thought_steps": "auto",
    "soft_close": 0.1, "close_message": "", "wave": None, "now": None,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A search between two rounds.

    settings: what decides the tree (`tree_settings`). elapsed_s: spent so far, all processes
    together. round_tokens, finished_s: as in `TreeRun`.
    """

    settings: Mapping[str, Any]
    tree: SearchTree
    elapsed_s: float
    round_tokens: Sequence[int]
    finished_s: Mapping[Node, float]

    def check_settings(self, file: Path, wanted: Mapping[str, Any]) -> None:
        """Raises InputError that names the first option that was another when `file` was saved."""
        check_plugins(self.settings, file)
        for option in dict.fromkeys([*wanted, *self.settings]):
            was, now = self.settings.get(option), wanted.get(option)
            if was != now:
                values = f"{flag_of(option)} {_shown(was)}, not {_shown(now)}"
                raise InputError(f"{file}: was saved with {values}")

    def go_on(self, run: TreeRun) -> None:
        """Tell a run how far it is."""
        run.elapsed_s, run.finished_s = self.elapsed_s, dict(self.finished_s)
        run.round_tokens.extend(self.round_tokens)


def check_plugins(saved: Mapping[str, Any], place: object) -> None:
    """Raises InputError that names the plugin of what was saved in `place`, not loaded here."""
    for code, option in CODE.items():
        name = str(saved.get(option))
        if code in saved and name not in _TABLES[option]:
            owner = str(saved[code]).partition("@")[0].removeprefix(PLUGIN_MODULE)
            raise InputError(
                f"{place}: was saved with --{option} {name} of the plugin {owner}, "
                "which is not loaded here (--plugin)"
            )


def check_own(saved: Mapping[str, Any], place: object, instead: str = "") -> None:
    """Raises InputError for a part that was an object. instead: what its owner can do."""
    for option in _TABLES:
        named = str(saved.get(option))
        if named.startswith(OWN) and "@" in named:
            owned = f"was saved with the {option} {named}, which only Python has"
            raise InputError(f"{place}: {owned}{instead}")


def tree_settings(
    settings: Settings, dtype: str, owners: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The settings that a tree depends on, by option.

    dtype: the precision that `auto` stands for. owners: who decides in the place of what an option
    names, by option (`identity_of`). Where and in which order things are computed is
    left out: it changes the time, and in float32 the last bits (docs/concepts/sameness.md).
    """
    chosen = settings.model_dump(mode="json", include=set(DECISIVE_SECTIONS))
    found = {
        option: value
        for section in chosen.values()
        for option, value in section.items()
        if option not in _NOT_THE_TREE
        and value not in ([], {}, _LATER.get(option, []))  # what nobody asked for
    }
    return {**found, **plugin_code(settings), "dtype": dtype, **(owners or {})}


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value) if isinstance(value, str) else str(value)


# --- writing ---------------------------------------------------------------------------------


@dataclass
class CheckpointWriter:
    """Saves one search to one file: the `save` of a `TreeRun`.

    saved: the file is of this search.
    """

    file: Path
    settings: Mapping[str, Any]
    saved: bool = False

    def __call__(self, run: TreeRun, elapsed_s: float) -> None:
        """Replace the file as a whole; it is on the disk when this returns.

        Raises:
            InputError: if the file cannot be written.
        """
        tree, finished_s, file = run.tree, run.finished_s, self.file
        body = {
            "settings": self.settings,
            "problem_id": tree.root.problem_id,
            "problem": tree.root.problem_text,
            "prompt_ids": tree.root.token_ids,
            "root_usage": tree.root.usage,
            "rounds": tree.rounds,
            "round_tokens": run.round_tokens,
            "elapsed_s": elapsed_s,
            "nodes": [_node(n, finished_s.get(n)) for n in tree.nodes() if n.parent is not None],
        }
        content, digest = _digested(body)
        head = json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest})
        if file.exists() and not file.is_file():
            said = "not a regular file; it could not be resumed from"
            raise InputError(f"--checkpoint {file}: {said}")
        write_whole(file, f'{head[:-1]}, "search": {content}}}\n', option="--checkpoint ")
        self.saved = True

    def end(self, **known: Any) -> None:
        """Add how the search has ended, for who looks at the file: nobody resumes from that.

        Its answer stands, whatever has become of the file.
        """
        if not self.saved:
            return
        with suppress(InputError):
            content = {**read_object(self.file), ENDED: known}
            write_whole(self.file, json.dumps(content) + "\n", option="--checkpoint ")


_AS_THEY_ARE = (
    "state", "token_ids", "logprobs", "stats", "top", "step_score", "score", "usage", "notes",
    "answer", "vote", "round", "greedy", "thought",
)  # fmt: skip


def _node(node: Node, finished_s: float | None) -> dict[str, Any]:
    assert node.parent is not None
    shared = len(before := node.parent.text)
    if not node.text.startswith(before):  # a letter of several bytes may end in the next step
        shared = len(os.path.commonprefix([before, node.text]))  # noqa: RUF071 (of letters)
    return {
        **{name: getattr(node, name) for name in _AS_THEY_ARE},
        "lineage": node.lineage[1:],
        "stop": str(node.stop),
        "shared_text": shared,
        "text": node.text[shared:],
        "turn": None if node.turn is None else (node.turn.text, node.turn.answers),
        "finished_s": finished_s,
    }


def _digested(body: Any) -> tuple[str, str]:
    """It as JSON with Python's names for what is not finite, and the checksum of that."""
    content = json.dumps(body, separators=(",", ":"))
    return content, hashlib.sha256(content.encode("ascii")).hexdigest()


# --- reading ---------------------------------------------------------------------------------


def read_checkpoint(file: Path) -> Checkpoint:
    """Read a checkpoint and build its tree again; no node has KV yet.

    Raises:
        InputError: if the file cannot be read, is no checkpoint, or is damaged; says which.
    """
    content = read_object(file, "a checkpoint", "--resume ")
    if content.get("format") != FORMAT:
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
_Seconds = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
_Number = Annotated[float, Strict()]
_Tokens = tuple[_Count, ...]
_Text = InstanceOf[str]  # with halves of surrogate pairs, too


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
    turn: tuple[_Text, Annotated[bool, Strict()]] | None
    finished_s: _Seconds | None
    top: tuple[tuple[tuple[_Count, _Number], ...], ...]
    notes: dict[str, _Text]
    answer: _Text | None = None
    vote: _Text | None = None
    thought: Annotated[bool, Strict()] = False


@dataclass(frozen=True)
class _SavedSearch:
    """What a `CheckpointWriter` writes."""

    settings: dict[str, Any]
    problem_id: Annotated[int, Strict()] | _Text
    problem: _Text
    prompt_ids: Annotated[_Tokens, Field(min_length=1)]
    root_usage: dict[str, _Spent]
    rounds: _Count
    round_tokens: tuple[_Count, ...]
    elapsed_s: _Seconds
    nodes: tuple[_SavedNode, ...]


_SEARCH = TypeAdapter(_SavedSearch)


def _tree_of(saved: _SavedSearch) -> Checkpoint:
    tree = SearchTree(saved.problem_id, saved.prompt_ids, saved.problem)
    tree.root.now = saved.settings.get("now")
    tree.rounds, tree.root.usage = saved.rounds, Counter(saved.root_usage)
    newest = max((step.round for step in saved.nodes), default=0)
    # One more where not all of it was judged, one less where no turn fitted.
    if abs(newest - saved.rounds) > 1:
        raise ValueError(f"rounds is {saved.rounds}, which is not the last node's round")
    finished_s: dict[Node, float] = {}
    by_lineage: dict[tuple[int, ...], Node] = {(): tree.root}
    parents = {step.lineage[:-1] for step in saved.nodes}
    for step in saved.nodes:
        parent = by_lineage[step.lineage[:-1]]
        node = _add(tree, parent, step, has_children=step.lineage in parents)
        if node.lineage[1:] != step.lineage:
            raise ValueError(f"node {step.lineage} is out of order")
        by_lineage[step.lineage] = node
        if step.finished_s is not None:
            finished_s[node] = step.finished_s
    pruned = [by_lineage[step.lineage] for step in saved.nodes if step.state is NodeState.PRUNED]
    for node in reversed(pruned):  # children first
        tree.prune(node)
    return Checkpoint(saved.settings, tree, saved.elapsed_s, saved.round_tokens, finished_s)


def _add(tree: SearchTree, parent: Node, saved: _SavedNode, *, has_children: bool) -> Node:
    """A decoded step, in the state in which it was saved; pruned ones are not pruned yet."""
    if saved.turn is not None:
        node = tree.ask(parent, Turn(*saved.turn), saved.token_ids)
        node.round, node.usage = saved.round, Counter(saved.usage)
        return node
    (node,) = tree.expand(parent, 1, greedy=saved.greedy)
    stop, node.round, node.usage = StopReason(saved.stop), saved.round, Counter(saved.usage)
    text = parent.text[: saved.shared_text] + saved.text
    written = saved.token_ids, saved.logprobs, stop, text, saved.stats, saved.top
    tree.commit(node, *written, thought=saved.thought)
    for name in ("step_score", "score", "notes", "answer", "vote"):
        setattr(node, name, getattr(saved, name))
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


# --- what a search is resumed with -----------------------------------------------------------


def resumed_settings(file: Path, given: Settings) -> Settings:
    """Settings to resume a checkpoint with; reads no models.

    given: what it sets (`model_fields_set`) stands; of what it does not, all that decides the tree
    comes from the file.

    Raises:
        InputError: if the file is no whole checkpoint, or `given` sets an option that was another
            when the file was saved.
    """
    saved = read_checkpoint(file)
    instead = ": give it to Solver, and call resume there"
    check_own(saved.settings, f"--resume {file}", instead)
    check_plugins(saved.settings, file)
    here: dict[str, Any] = {}
    for name in DECISIVE_SECTIONS:
        here |= getattr(given, name).model_dump(mode="json", exclude_unset=True)
    if here.get("sparse") == "auto":  # it stands for what it stood for
        del here["sparse"]
    # An error names an option that is given, not what a strategy makes of it.
    shared = {option: here[option] for option in here if option in saved.settings}
    saved.check_settings(file, {**saved.settings, **shared, "dtype": saved.settings.get("dtype")})
    kept = {o: v for o, v in saved.settings.items() if o not in here and o not in CODE}
    try:
        settings = given.changed(**kept)
        model = settings.model
        dtype, _ = precision(model, find_shape(model), "generator")
        wanted = tree_settings(with_defaults(settings), str(dtype).removeprefix("torch."))
    except InputError as error:
        raise InputError(f"--resume {file}: {error}") from error
    saved.check_settings(file, wanted)
    return settings

"""Write and read checkpoints: the whole search tree after a round, to resume a search from.

A checkpoint contains tokens, texts, scores, node states, counts of spent tokens, and the settings
that the tree depends on. It contains no KV and no models. The file is JSON with a checksum. `solve
--checkpoint` replaces it after every round, when the round is scored and nothing is selected yet,
so no step is half decoded in it. The file is whole even if the process is killed. The settings to
resume with are read from it before any model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os.path
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf, Strict, TypeAdapter, ValidationError

from beamwright.config import Settings
from beamwright.declare import VERIFIERS
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import InputError
from beamwright.io import describe_validation_error, read_json_object, write_atomically
from beamwright.models.hf_config import find_shape
from beamwright.models.load import resolve_precision
from beamwright.registry import PLUGIN_MODULE, Table, flag_of
from beamwright.saved.identity import CODE_KEYS, plugin_fingerprints
from beamwright.search import STRATEGIES
from beamwright.search.answers import ANSWERS
from beamwright.search.defaults import with_defaults
from beamwright.tree import Node, NodeState, SearchTree, StopReason, Turn

FORMAT = "beamwright checkpoint"
VERSION = 4
ENDED = "ended"  # key of an ended search's result, see `CheckpointWriter.end`
OBJECT_PREFIX = "python:"  # prefix of the name of a part that a user passed as an object
DECISIVE_SECTIONS = ("model", "sampling", "step", "search", "sparse")  # the tree depends on them
_TABLES: dict[str, Table[Any]] = {"search": STRATEGIES, "verifier": VERIFIERS, "answers": ANSWERS}
# Options of these sections that the tree does not depend on.
_NOT_THE_TREE = {"device", "attention", "top_logprobs", "choose", "sparse_home"}
# Options that files of older versions lack, with the values that those versions used.
_OLD_DEFAULTS = {
    "kv_dtype": "auto", "verify_every": 1, "thinking": "auto", "thought_steps": "auto",
    "soft_close": 0.1, "close_message": "", "wave": None, "now": None,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file: a search between two rounds.

    settings: the settings that the tree depends on (`tree_settings`).
    elapsed_s: seconds spent so far, summed over all processes that worked on the search.
    round_tokens, finished_s: the same as in `engine.tree_run.TreeRun`.
    """

    settings: Mapping[str, Any]
    tree: SearchTree
    elapsed_s: float
    round_tokens: Sequence[int]
    finished_s: Mapping[Node, float]

    def check_settings(self, file: Path, wanted: Mapping[str, Any]) -> None:
        """Check that `wanted`, by `tree_settings`, equals the settings with which `file` was saved.

        Raises:
            InputError: if they differ; the message names the first option that differs.
        """
        check_plugins(self.settings, file)
        for option in dict.fromkeys([*wanted, *self.settings]):
            was, now = self.settings.get(option), wanted.get(option)
            if was != now:
                values = f"{flag_of(option)} {_format_value(was)}, not {_format_value(now)}"
                raise InputError(f"{file}: was saved with {values}; use the saved value")

    def restore_progress(self, run: TreeRun) -> None:
        """Copy elapsed time and token counts of the saved search to `run`, which resumes it."""
        run.elapsed_s, run.finished_s = self.elapsed_s, dict(self.finished_s)
        run.round_tokens.extend(self.round_tokens)


def check_plugins(saved: Mapping[str, Any], place: object) -> None:
    """Check that every plugin that saved settings name is loaded.

    place: the file or other source of the settings, for the message.

    Raises:
        InputError: if a plugin is missing; the message names it.
    """
    for code, option in CODE_KEYS.items():
        name = str(saved.get(option))
        if code in saved and name not in _TABLES[option]:
            owner = str(saved[code]).partition("@")[0].removeprefix(PLUGIN_MODULE)
            raise InputError(
                f"{place}: was saved with --{option} {name} of the plugin {owner}, "
                "which is not loaded; pass it with --plugin"
            )


def check_no_objects(saved: Mapping[str, Any], place: object, instead: str) -> None:
    """Check that no strategy, verifier or answer format of saved settings was a Python object.

    place: the file or other source of the settings, for the message.
    instead: advice for the message.

    Raises:
        InputError: if one of them was an object, which cannot be saved.
    """
    for option in _TABLES:
        named = str(saved.get(option))
        if named.startswith(OBJECT_PREFIX) and "@" in named:
            owned = f"was saved with the {option} {named}, an object in Python"
            raise InputError(f"{place}: {owned}{instead}")


def tree_settings(
    settings: Settings, dtype: str, owners: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the settings that decide a tree, by option, for checkpoints and receipts.

    Options that only decide where and in which order the tree is computed are left out. They change
    the time, and in float32 the last bits (docs/concepts/sameness.md).

    dtype: the precision that `auto` stands for.
    owners: identities (`identity_of`) of Python objects that the user passed in place of a
        strategy, verifier or answer format, by option.
    """
    chosen = settings.model_dump(mode="json", include=set(DECISIVE_SECTIONS))
    options = {
        option: value
        for section in chosen.values()
        for option, value in section.items()
        if option not in _NOT_THE_TREE
        # an option at its default is left out, as in files of older versions
        and value not in ([], {}, _OLD_DEFAULTS.get(option, []))
    }
    return {**options, **plugin_fingerprints(settings), "dtype": dtype, **(owners or {})}


def _format_value(value: Any) -> str:
    """Return a setting's value as an error message shows it."""
    return "unset" if value is None else repr(value) if isinstance(value, str) else str(value)


# --- writing ---------------------------------------------------------------------------------


@dataclass
class CheckpointWriter:
    """Writer that replaces one checkpoint file after each round; used as the `save` of a `TreeRun`.

    saved: True once the file contains this search.
    """

    file: Path
    settings: Mapping[str, Any]
    saved: bool = False

    def __call__(self, run: TreeRun, elapsed_s: float) -> None:
        """Write the checkpoint atomically. The content is on the disk when this returns.

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
            "nodes": [
                _node_to_json(n, finished_s.get(n)) for n in tree.nodes() if n.parent is not None
            ],
        }
        content, digest = _json_and_checksum(body)
        head = json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest})
        if file.exists() and not file.is_file():
            said = "must be a regular file, so that a search can be resumed from it"
            raise InputError(f"--checkpoint {file}: {said}")
        write_atomically(file, f'{head[:-1]}, "search": {content}}}\n', option="--checkpoint ")
        self.saved = True

    def end(self, **known: Any) -> None:
        """Add the result of the search to the file, for viewers; resuming does not read it.

        Errors of the file are ignored, because the answer is valid anyway.
        """
        if not self.saved:
            return
        with suppress(InputError):
            content = {**read_json_object(self.file), ENDED: known}
            write_atomically(self.file, json.dumps(content) + "\n", option="--checkpoint ")


_COPIED_FIELDS = (
    "state", "token_ids", "logprobs", "stats", "top", "step_score", "score", "usage", "notes",
    "answer", "vote", "round", "greedy", "thought",
)  # fmt: skip


def _node_to_json(node: Node, finished_s: float | None) -> dict[str, Any]:
    """Return a node as JSON data, with only the length of the text that its parent has too."""
    assert node.parent is not None
    shared = len(before := node.parent.text)
    if not node.text.startswith(before):  # a character of several bytes may end in the next step
        shared = len(os.path.commonprefix([before, node.text]))  # noqa: RUF071 (by character)
    return {
        **{name: getattr(node, name) for name in _COPIED_FIELDS},
        "lineage": node.lineage[1:],
        "stop": str(node.stop),
        "shared_text": shared,
        "text": node.text[shared:],
        "turn": None if node.turn is None else astuple(node.turn),
        "finished_s": finished_s,
    }


def _json_and_checksum(body: Any) -> tuple[str, str]:
    """Serialise `body` to JSON, and return the text with its SHA-256.

    NaN and infinities are written with Python's names.
    """
    content = json.dumps(body, separators=(",", ":"))
    return content, hashlib.sha256(content.encode("ascii")).hexdigest()


# --- reading ---------------------------------------------------------------------------------


def read_checkpoint(file: Path) -> Checkpoint:
    """Read a checkpoint and rebuild its tree. No node has KV yet.

    Raises:
        InputError: if the file cannot be read, is not a checkpoint, or is damaged; the message says
            which.
    """
    content = read_json_object(file, "a checkpoint", "--resume ")
    if content.get("format") != FORMAT:
        raise InputError(f"--resume {file}: not a checkpoint")
    if content.get("version") != VERSION:
        raise InputError(
            f"--resume {file}: a checkpoint of version {content.get('version')!r}; "
            f"this program reads version {VERSION}"
        )
    try:
        if _json_and_checksum(content["search"])[1] != content["sha256"]:
            raise InputError(f"--resume {file}: the checkpoint is damaged (checksum)")
        return _rebuild_checkpoint(_SEARCH.validate_python(content["search"]))
    except ValidationError as error:
        what = describe_validation_error(error)
    except (KeyError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
    raise InputError(f"--resume {file}: the checkpoint is damaged ({what})")


_Count = Annotated[int, Strict(), Field(ge=0, lt=1 << 53)]
# may be negative, because a count can be corrected downwards
_Spent = Annotated[int, Strict(), Field(gt=-(1 << 53), lt=1 << 53)]
_Seconds = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
_Number = Annotated[float, Strict()]
_Tokens = tuple[_Count, ...]
_Flag = Annotated[bool, Strict()]
_Text = InstanceOf[str]  # may contain lone surrogates, unlike pydantic's str


@dataclass(frozen=True)
class _SavedNode:
    """Schema of a node in a checkpoint file, as `_node_to_json` writes it."""

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
    turn: (
        tuple[_Text, _Flag]
        | tuple[_Text, _Flag, _Flag, _Flag, tuple[tuple[_Count, ...], ...]]
        | None
    )
    finished_s: _Seconds | None
    top: tuple[tuple[tuple[_Count, _Number], ...], ...]
    notes: dict[str, _Text]
    answer: _Text | None = None
    vote: _Text | None = None
    thought: Annotated[bool, Strict()] = False


@dataclass(frozen=True)
class _SavedSearch:
    """Schema of the search in a checkpoint file, as `CheckpointWriter` writes it."""

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


def _rebuild_checkpoint(saved: _SavedSearch) -> Checkpoint:
    """Convert validated file content to a checkpoint with its tree.

    Raises:
        ValueError: if the nodes contradict each other.
    """
    tree = SearchTree(saved.problem_id, saved.prompt_ids, saved.problem)
    tree.root.now = saved.settings.get("now")
    tree.rounds, tree.root.usage = saved.rounds, Counter(saved.root_usage)
    newest = max((step.round for step in saved.nodes), default=0)
    # The newest node may be one round ahead, if parts of a round were not scored, or one round
    # behind, if no turn fitted the context.
    if abs(newest - saved.rounds) > 1:
        raise ValueError(f"rounds is {saved.rounds}, but the last node's is {newest}")
    finished_s: dict[Node, float] = {}
    by_lineage: dict[tuple[int, ...], Node] = {(): tree.root}
    parents = {step.lineage[:-1] for step in saved.nodes}
    for step in saved.nodes:
        parent = by_lineage[step.lineage[:-1]]
        node = _add_node(tree, parent, step, has_children=step.lineage in parents)
        if node.lineage[1:] != step.lineage:
            raise ValueError(f"node {step.lineage} is out of order")
        by_lineage[step.lineage] = node
        if step.finished_s is not None:
            finished_s[node] = step.finished_s
    pruned = [by_lineage[step.lineage] for step in saved.nodes if step.state is NodeState.PRUNED]
    for node in reversed(pruned):  # children first
        tree.prune(node)
    return Checkpoint(saved.settings, tree, saved.elapsed_s, saved.round_tokens, finished_s)


def _add_node(tree: SearchTree, parent: Node, saved: _SavedNode, *, has_children: bool) -> Node:
    """Add a saved step to the tree, in its saved state, and return its node.

    The caller prunes pruned steps later, because they may have children.

    Raises:
        ValueError: if the step was open.
    """
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
            tree.keep(node)  # pruned later, when its children exist
        case NodeState.FINISHED:
            tree.finish(node)
        case NodeState.OPEN:
            raise ValueError(f"{node!r} was not decoded")
    return node


# --- resuming --------------------------------------------------------------------------------


def resumed_settings(file: Path, given: Settings) -> Settings:
    """Merge the user's settings with those of a checkpoint, without loading any model.

    given: the user's settings. Options that they set (`model_fields_set`) are kept. All other
        options that the tree depends on come from the file.

    Raises:
        InputError: if the file is not a whole checkpoint, or if `given` sets an option to another
            value than the file.
    """
    saved = read_checkpoint(file)
    instead = "; pass the object to Solver and call resume"
    check_no_objects(saved.settings, f"--resume {file}", instead)
    check_plugins(saved.settings, file)
    here: dict[str, Any] = {}
    for name in DECISIVE_SECTIONS:
        here |= getattr(given, name).model_dump(mode="json", exclude_unset=True)
    if here.get("sparse") == "auto":  # the saved file has the method that `auto` stood for
        del here["sparse"]
    # Compare the user's own options first, so that an error names one of them and not an option
    # that a strategy derives from it.
    shared = {option: here[option] for option in here if option in saved.settings}
    saved.check_settings(file, {**saved.settings, **shared, "dtype": saved.settings.get("dtype")})
    kept = {o: v for o, v in saved.settings.items() if o not in here and o not in CODE_KEYS}
    try:
        settings = given.changed(**kept)
        model = settings.model
        dtype, _ = resolve_precision(model, find_shape(model), "generator")
        wanted = tree_settings(with_defaults(settings), str(dtype).removeprefix("torch."))
    except InputError as error:
        raise InputError(f"--resume {file}: {error}") from error
    saved.check_settings(file, wanted)
    return settings

"""Read the search trees that `solve --record-tree` writes.

A recorded tree has lineages, token counts, stop reasons, states and scores, but no text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from beamwright.errors import InputError
from beamwright.io import describe_validation_error, read_json_object
from beamwright.tree import NodeState, StopReason
from beamwright.tree.recording import VERSION

_Count = Annotated[int, Strict(), Field(ge=0)]
_Tokens = Annotated[int, Strict(), Field(ge=1)]
_Score = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_WHOLE = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_WHOLE)
class RecordedNode:
    """A decoded step, or a turn between two replies.

    lineage: child numbers from the root, without the problem id.
    tokens: length of this step or turn.
    stop: None for a turn.
    began: the round that opened the node; None: its depth.
    turn: "alone" if a turn is a prompt of its own, "follows" if not; None for a step.
    """

    lineage: Annotated[tuple[_Count, ...], Field(min_length=1)]
    tokens: _Tokens
    stop: StopReason | None
    state: NodeState
    score: _Score | None
    began: _Count | None = None
    turn: Literal["alone", "follows"] | None = None

    @property
    def round(self) -> int:
        """The round that decoded the step, from 1."""
        return len(self.lineage) if self.began is None else self.began

    @property
    def ends_path(self) -> bool:
        """True if the step ended its path."""
        return self.stop is not None and self.stop.ends_path


@dataclass(frozen=True, config=_WHOLE)
class RecordedTree:
    """A recorded search.

    rounds: number of rounds.
    nodes: all decoded steps, in lineage order.
    """

    problem_id: Annotated[int, Strict()] | Annotated[str, Strict()]
    prompt_tokens: _Tokens
    rounds: _Count
    nodes: tuple[RecordedNode, ...]


def read_recorded(path: Path) -> RecordedTree:
    """Read a recorded tree.

    Raises:
        InputError: if the file cannot be read or is not a recorded tree.
    """
    content = read_json_object(path, "a recorded tree")
    version = content.pop("version", None)
    try:
        if version != VERSION:
            raise ValueError(f"version is {version!r}, not {VERSION}")
        tree = TypeAdapter(RecordedTree).validate_python(content)
        _check_lineages(tree)
    except ValueError as error:
        fault = describe_validation_error(error) if isinstance(error, ValidationError) else error
        raise InputError(f"{path}: not a recorded tree: {fault}") from error
    return tree


def _check_lineages(tree: RecordedTree) -> None:
    """Check that every node follows its parent, which was kept, and its previous sibling."""
    num_children: dict[tuple[int, ...], int] = {(): 0}
    last: tuple[int, ...] = ()
    for i, node in enumerate(tree.nodes):
        where = f"nodes[{i}] ({'.'.join(map(str, node.lineage))})"
        parent, ordinal = node.lineage[:-1], node.lineage[-1]
        if node.state is NodeState.OPEN:
            raise ValueError(f"{where}: state is 'open': it was not decoded")
        if node.lineage <= last:
            raise ValueError(f"{where} is out of lineage order")
        if parent not in num_children:
            raise ValueError(f"{where}: its parent is missing or was not kept")
        if ordinal != num_children[parent]:
            raise ValueError(f"{where}: child {num_children[parent]} of its parent is missing")
        if node.round > tree.rounds:
            raise ValueError(f"{where} began after the {tree.rounds} rounds")
        num_children[parent] += 1
        if node.state is NodeState.KEPT:
            num_children[node.lineage] = 0
        last = node.lineage

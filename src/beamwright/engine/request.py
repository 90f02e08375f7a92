"""How a tree's steps are drawn and where they end: its own settings, or those of the batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from beamwright.errors import InputError
from beamwright.sections import SamplingSettings, StepSettings
from beamwright.tree import Node

_LONGEST_DELIMITER = 256


@dataclass(frozen=True)
class Decoding:
    """What a tree's tokens depend on beside the model, the prompt and the lineage."""

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    step: StepSettings = field(default_factory=StepSettings)
    seed: int = 0


class Decodings:
    """Each tree's; `default` for those without one of their own."""

    def __init__(self, default: Decoding) -> None:
        self.default = default
        self._own: dict[Node, Decoding] = {}

    def set(self, root: Node, decoding: Decoding) -> None:
        """Decode the tree of this root so, from its first step on.

        Raises:
            InputError: for a delimiter so long that its tables would fill the device.
        """
        if decoding == self.default:
            self._own.pop(root, None)
            return
        delimiter, known = decoding.step.delimiter, self.default.step.delimiter
        if delimiter != known and len(delimiter.encode()) > _LONGEST_DELIMITER:
            raise InputError(f"a request's delimiter has at most {_LONGEST_DELIMITER} bytes")
        self._own[root] = decoding

    def of(self, node: Node) -> Decoding:
        """How this node's tree is decoded."""
        return self._own.get(node.root, self.default) if self._own else self.default

    def forget(self, node: Node) -> None:
        """The tree of this node is over, if the node is its root."""
        self._own.pop(node, None)

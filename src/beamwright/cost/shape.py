"""What a cost needs to know of a model's shape. Knows no model class.

A seam: the room that owns model shapes is not imported here; its objects fit by their attributes.
"""

from __future__ import annotations

from typing import Protocol


class Shape(Protocol):
    """The attributes of a model shape that costs are made of."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def projections(self) -> tuple[tuple[int, int], ...]: ...
    def kv_bytes_per_token(self, element_bytes: int, /) -> int: ...

"""What a cost needs to know of a model and of a machine. Knows no model class and no profile.

`Hardware` is a seam: the room that owns hardware profiles is not imported here; its objects fit by
their attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from beamwright.cost.shape import Shape
from beamwright.cost.weights import Storage, conversion_bytes, weight_bytes


class Hardware(Protocol):
    """The attributes of a hardware profile that costs are made of; see `hardware.profile`."""

    @property
    def device_bandwidth(self) -> float: ...
    @property
    def flops(self) -> float: ...
    @property
    def h2d_bandwidth(self) -> float: ...
    @property
    def d2h_bandwidth(self) -> float: ...
    @property
    def launch_s(self) -> float: ...
    @property
    def copy_launch_s(self) -> float: ...
    @property
    def decode_ops_per_layer(self) -> int: ...
    @property
    def bandwidth_share(self) -> float: ...
    @property
    def copies_share(self) -> float: ...
    @property
    def flops_share(self) -> float: ...
    @property
    def link_share(self) -> float: ...


@dataclass(frozen=True)
class ModelCosts:
    """Sizes of one model in one precision. num_heads: query heads.

    conversion_bytes: memory traffic of a forward pass beyond reading the weights as they are
    stored, where they are turned back into floating point first.
    """

    num_layers: int
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    num_heads: int
    head_dim: int
    element_bytes: int
    conversion_bytes: int = 0

    @classmethod
    def of(cls, shape: Shape, element_bytes: int, storage: Storage = Storage.PLAIN) -> ModelCosts:
        """The costs of a shape whose KV, and weights but for `storage`, take `element_bytes`."""
        return cls(
            num_layers=shape.layers,
            num_parameters=shape.num_parameters,
            weight_bytes=weight_bytes(shape, element_bytes, storage),
            kv_bytes_per_token=shape.kv_bytes_per_token(element_bytes),
            num_heads=shape.heads,
            head_dim=shape.head_dim,
            element_bytes=element_bytes,
            conversion_bytes=conversion_bytes(shape, element_bytes, storage),
        )

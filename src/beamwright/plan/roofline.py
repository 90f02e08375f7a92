"""Seconds of each operation: the slower of memory and compute, plus launches. No torch.

A floor that real kernels approach to the shares that the hardware profile states.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from beamwright.plan.model import Hardware, ModelCosts
from beamwright.protocols import Direction


class Layout(StrEnum):
    """How attention reads KV: a copy per beam (the LBS paper's layout), or shared parts once."""

    DENSE = "dense"
    TREE = "tree"


Bound = Literal["bandwidth", "compute", "launches"]


@dataclass(frozen=True)
class Roofline:
    """Costs of one model on one machine."""

    model: ModelCosts
    hardware: Hardware

    def prefill(self, num_tokens: int, context: int = 0) -> float:
        """Seconds to encode `num_tokens` behind `context` tokens that are there already."""
        visible = num_tokens * (context + (num_tokens + 1) / 2)
        read_tokens = context + num_tokens
        return self._forward(num_tokens, read_tokens, visible, Layout.TREE)

    def verify(self, num_tokens: int, context: int = 0) -> float:
        """Seconds for a verifier of this size to score `num_tokens` behind `context` tokens."""
        return self.prefill(num_tokens, context)

    def decode_step(
        self,
        num_rows: int,
        kv_tokens_read: float,
        kv_tokens_seen: float,
        layout: Layout = Layout.TREE,
    ) -> float:
        """Seconds of one token for each of `num_rows` beams of one group; weights are read once.

        kv_tokens_read: the union of the paths where shared parts are read once, else their sum.
        kv_tokens_seen: the sum of the paths, which is what the rows attend to either way.
        """
        return self._forward(num_rows, kv_tokens_read, kv_tokens_seen, layout)

    def decode_layer(
        self,
        num_rows: int,
        kv_tokens_read: float,
        kv_tokens_seen: float,
        layout: Layout = Layout.TREE,
    ) -> float:
        """The same for one layer: what a layer-wise schedule can hide a transfer behind."""
        step_s = self.decode_step(num_rows, kv_tokens_read, kv_tokens_seen, layout)
        return step_s / self.model.num_layers

    def transfer(self, num_bytes: float, num_pieces: float, direction: Direction) -> float:
        """Seconds to move bytes across the link in that many queued copies."""
        hardware = self.hardware
        to_device = direction is Direction.H2D
        bandwidth = hardware.h2d_bandwidth if to_device else hardware.d2h_bandwidth
        return num_bytes / (bandwidth * hardware.link_share) + num_pieces * hardware.copy_launch_s

    def bound(
        self, num_rows: int, kv_tokens_read: float, kv_tokens_seen: float, layout: Layout
    ) -> Bound:
        """What a decode step, or a prefill of so many tokens, mostly waits for."""
        memory_s, compute_s, launch_s = self.parts(num_rows, kv_tokens_read, kv_tokens_seen, layout)
        if launch_s > max(memory_s, compute_s):
            return "launches"
        return "bandwidth" if memory_s >= compute_s else "compute"

    def _forward(
        self, num_tokens: int, kv_tokens_read: float, kv_tokens_seen: float, layout: Layout
    ) -> float:
        memory_s, compute_s, launch_s = self.parts(
            num_tokens, kv_tokens_read, kv_tokens_seen, layout
        )
        return max(memory_s, compute_s) + launch_s

    def parts(
        self, num_tokens: int, kv_tokens_read: float, kv_tokens_seen: float, layout: Layout
    ) -> tuple[float, float, float]:
        """Seconds of a forward pass by memory, by compute, and of launches; see `decode_step`.

        The pass takes the longer of the first two, and the third.
        """
        model, hardware = self.model, self.hardware
        kv_share = hardware.copies_share if layout is Layout.DENSE else hardware.bandwidth_share
        memory_s = (
            (model.weight_bytes + model.conversion_bytes) / hardware.bandwidth_share
            + kv_tokens_read * model.kv_bytes_per_token / kv_share
        ) / hardware.device_bandwidth
        attention = 4 * model.num_layers * model.num_heads * model.head_dim * kv_tokens_seen
        flops = 2 * model.num_parameters * num_tokens + attention
        compute_s = flops / (hardware.flops * hardware.flops_share)
        num_launches = model.num_layers * hardware.decode_ops_per_layer
        return memory_s, compute_s, num_launches * hardware.launch_s

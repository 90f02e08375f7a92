"""llama.cpp's partial offload: seconds of a pass if some layers are in host memory.

The rules, by its source of 2026:

- `-ngl K` puts the output layer on the card, then the last K - 1 layers, each with its KV. The
  token embedding stays on the host (`load_tensors` in `src/llama-model.cpp`).
- For fewer than 32 tokens in a batch, the host computes its own layers. From 32 tokens on, it
  copies their weights to the card for every batch (`ggml_backend_cuda_device_offload_op`; the
  variable `GGML_OP_OFFLOAD_MIN_BATCH` changes the number, pull request 18535). Of experts, only the
  used ones are copied (`ggml_backend_sched_compute_splits`).
- These copies do not overlap with compute (pull request 21067 is a draft that would change this).

Where the source leaves a choice, the faster one is taken: copies reach the rate of page-locked
memory, attention to KV in host memory costs the host's bandwidth and no FLOPs from 32 tokens on,
prefixes are read once, and passes of the card replay CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.machines import HardwareProfile
from beamwright.protocols import Direction

OP_OFFLOAD_MIN_BATCH = 32


@dataclass(frozen=True)
class Host:
    """The host's CPU. bandwidth: bytes/s of its memory. flops: its rate with quantised weights."""

    bandwidth: float = 60e9
    flops: float = 1e12


@dataclass(frozen=True)
class LlamaModel:
    """A model of llama.cpp, by the bytes that decide `-ngl`.

    layer_bytes: weights of one layer. head_bytes: the output layer.
    kv_bytes: KV of all layers, which is allocated in advance.
    """

    costs: ModelCosts
    layer_bytes: int
    head_bytes: int
    kv_bytes: int

    def card_bytes(self, num_layers: int) -> int:
        """Return the bytes on the card for `num_layers` layers beside the output layer."""
        return self.head_bytes + num_layers * self._bytes_per_layer

    def layers_that_fit(self, left_bytes: int) -> int | None:
        """Return the most layers that fit; None if not even the output layer does (`-ngl 0`)."""
        if left_bytes < self.head_bytes:
            return None
        fit = (left_bytes - self.head_bytes) // self._bytes_per_layer
        return min(self.costs.num_layers, fit)

    def pass_s(
        self,
        card_layers: int | None,
        card: HardwareProfile,
        host: Host,
        num_tokens: int,
        kv_read: float,
        kv_seen: float,
    ) -> float:
        """Return the seconds of one batch, whose parts on card and host run in turn.

        card_layers: layers on the card; None: not even the output layer.
        num_tokens, kv_read, kv_seen: as in `Roofline.decode_step_s`.
        """
        num_layers = self.costs.num_layers
        host_layers = num_layers - (card_layers or 0)
        host_share = host_layers * self.layer_bytes / self.costs.weight_bytes
        if card_layers is None:
            host_share = 1.0
        on_card = _part(self.costs, 1 - host_share, num_layers - host_layers)
        on_host = _part(self.costs, host_share, host_layers)
        seconds = Roofline(on_card, card).decode_step_s(num_tokens, kv_read, kv_seen)
        if not host_share:
            return seconds
        if num_tokens < OP_OFFLOAD_MIN_BATCH:
            cpu = _host_profile(card, host)
            unconverted = replace(on_host, conversion_bytes=0)
            return seconds + Roofline(unconverted, cpu).decode_step_s(num_tokens, kv_read, kv_seen)
        copied = on_host.weight_bytes * on_host.share_of_weights_read(num_tokens)
        there = Roofline(on_host, card)
        copy_s = there.transfer_s(copied, 0, Direction.H2D)
        kv_s = kv_read * on_host.kv_bytes_per_token / host.bandwidth
        return seconds + copy_s + kv_s + there.decode_step_s(num_tokens, 0, kv_seen)

    @property
    def _bytes_per_layer(self) -> int:
        return self.layer_bytes + self.kv_bytes // self.costs.num_layers


def _part(costs: ModelCosts, share: float, num_layers: int) -> ModelCosts:
    """Return the costs of `num_layers` layers that have `share` of all weights."""
    active = costs.active_parameters
    return replace(
        costs,
        num_layers=num_layers,
        num_parameters=max(1, round(share * costs.num_parameters)),
        active_parameters=None if active is None else max(1, round(share * active)),
        weight_bytes=round(share * costs.weight_bytes),
        conversion_bytes=round(share * costs.conversion_bytes),
        kv_bytes_per_token=costs.kv_bytes_per_token * num_layers // costs.num_layers,
    )


def _host_profile(card: HardwareProfile, host: Host) -> HardwareProfile:
    """Return a profile of the host's CPU, which has no launches."""
    return replace(
        card,
        device_bandwidth=host.bandwidth,
        bandwidth_share=1.0,
        flops=host.flops,
        flops_share=1.0,
        launch_s=1e-30,
    )

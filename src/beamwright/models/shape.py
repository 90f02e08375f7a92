"""ModelShape: everything the decoder needs to know of a checkpoint, in one frozen object.

Knows no Hugging Face keys (`hf_config` reads those) and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """One dense decoder.

    context: most positions a path may have; full_context: what the checkpoint was made for.
    embed_dim: width of the token embedding; differs from `hidden` where OPT projects in and out.
    norm: "rms" or "layer"; pre_norm: normalise before (True) or after each block's output.
    activation: "silu", "relu", "gelu" or "gelu_tanh"; gated: gate * up instead of one projection.
    learned_positions: offset of OPT's position table, or None for rotary positions.
    tied: the LM head is the embedding. has_lm_head: logits are read; not of a reward model that has
    a head of its own.
    stored_bfloat16: whether the checkpoint says that its weights are in bfloat16.
    inv_freq: rotary inverse frequencies [head_dim / 2]; rope_scale multiplies cos and sin (yarn).
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    full_context: int
    norm_eps: float = 1e-6
    norm: str = "rms"
    norm_affine: bool = True
    pre_norm: bool = True
    final_norm: bool = True
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    has_lm_head: bool = True
    embed_dim: int | None = None
    learned_positions: int | None = None
    inv_freq: tuple[float, ...] = ()
    rope_scale: float = 1.0
    stored_bfloat16: bool = False

    @property
    def num_parameters(self) -> int:
        """Parameters, tied embeddings counted once."""
        h, d = self.hidden, self.head_dim
        q, kv = self.heads * d, self.kv_heads * d
        embed = self.embed_dim or h
        norm = (h if self.norm == "rms" else 2 * h) if self.norm_affine else 0
        attention = h * (q + 2 * kv) + q * h
        attention += (q + 2 * kv if self.qkv_bias else 0) + (h if self.out_bias else 0)
        attention += 2 * d if self.qk_norm else 0
        mlp = (3 if self.gated else 2) * h * self.intermediate
        if self.mlp_bias:
            mlp += (2 if self.gated else 1) * self.intermediate + h
        total = self.layers * (attention + mlp + 2 * norm) + self.vocab * embed
        total += 0 if self.tied or not self.has_lm_head else self.vocab * embed
        total += norm if self.final_norm else 0
        if self.learned_positions is not None:
            total += (self.full_context + self.learned_positions) * h
        if embed != h:
            total += 2 * embed * h
        return total

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of one layer's matrices: (fused) qkv, out, gate_up, down."""
        h, d, inner = self.hidden, self.head_dim, self.intermediate
        q, kv = self.heads * d, self.kv_heads * d
        return ((q + 2 * kv, h), (h, q), ((2 if self.gated else 1) * inner, h), (h, inner))

    def working_bytes_per_row(self, element_bytes: int) -> int:
        """Estimate of what a decode step needs per row beside KV: activations, and logits five
        times in float32 (scores, scaled, filtered, with noise, as log-probabilities)."""
        return 5 * 4 * self.vocab + self.activation_width * element_bytes

    @property
    def activation_width(self) -> int:
        """Estimate of the values that one token has in flight inside a layer."""
        return 4 * self.hidden + 3 * self.intermediate

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """K and V of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

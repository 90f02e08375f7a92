"""What the decoder has to know of a model: its shape, and what each family is.

A family is one declaration in `shape.toml`. Knows no models' files and no weights (`hf_config`,
`weights`), needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from beamwright.errors import UnsupportedModelError
from beamwright.io import read_beside
from beamwright.plan.costs import record_bytes
from beamwright.sections import KVDtype

HEAD_TOKENS = 256
"""Tokens whose values a verifier's head makes at a time: logits of a whole vocabulary are wide."""


class NotBuiltError(UnsupportedModelError):
    """Another engine may well run this model."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose keys, values and attention are alike.

    layers: their numbers, of those that have KV of their own. window: how many tokens a token sees,
    itself included; None for all. softcap: scores become `softcap * tanh(score / softcap)`.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None

    def bytes_per_token(self, element_bytes: int, kv_dtype: KVDtype = "auto") -> int:
        """Bytes of one token's K and V in these layers; in 8 bits, of their exponents, too."""
        size = self.head_dim * element_bytes if kv_dtype == "auto" else self.head_dim + 1
        return 2 * len(self.layers) * self.kv_heads * size


@dataclass(frozen=True)
class StatePart:
    """One tensor that a recurrent layer keeps of a row, instead of KV.

    kind: "conv" (the last inputs of its convolution) or "recurrent". wide: in float32 whatever the
    dtype.
    """

    layer: int
    kind: str
    size: tuple[int, ...]
    wide: bool = False

    def num_bytes(self, element_bytes: int) -> int:
        """Bytes of a row, in a flat record of all parts: filled up so that each begins aligned."""
        return record_bytes(self.size, 4 if self.wide else element_bytes)


@dataclass(frozen=True)
class BuiltSizes:
    """What a model is built of that the numbers of a dense decoder do not say.

    parameters: all, and those that one token is multiplied with. head: those of the LM head, where
    it has its own. matrices: rows and columns of projections that `--weights` is for, and how many.
    """

    parameters: int
    active: int
    head: int
    matrices: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class ModelShape:
    """One decoder.

    context: most positions a path may have; full_context: what the checkpoint was made for.
    norm: "rms" or "layer", before each block's two halves and behind the last.
    activation: "silu", "relu", "gelu" or "gelu_tanh"; gated: gate * up instead of one projection.
    learned_positions: offset of OPT's position table, or None for rotary positions.
    tied: the LM head is the embedding. has_lm_head: logits are read; not of a reward model that has
    a head of its own.
    stored_bfloat16: whether the checkpoint says that its weights are in bfloat16.
    inv_freq: rotary inverse frequencies [head_dim / 2]; rope_scale multiplies cos and sin (yarn).
    near_freq: the same of layers `near`, where those have others.
    embed_scale: what rows of the embedding are multiplied by. lifted: norms' weights are stored
    without the 1 that is added to them. after_norms: what a half adds is normalised, too.
    groups: layers by what attention does in them; () where all do alike, and see all tokens.
    states: what recurrent layers keep of a row, in the order of a flat record.
    shared: (layer, whose KV it reads) of layers that have none of their own.
    packed: of a quantised checkpoint's projections, all layers together, the bytes of those that
    stay quantised, and the values of the others; None of a plain one.
    blocks: of a GGUF file, the bytes of its blocks as products of ours read them, and the values of
    its other tensors; None of other files.
    built: of a model that `transformers` builds; None where the decoder is our own.
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
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    has_lm_head: bool = True
    learned_positions: int | None = None
    inv_freq: tuple[float, ...] = ()
    rope_scale: float = 1.0
    near_freq: tuple[float, ...] = ()
    near: tuple[int, ...] = ()
    embed_scale: float = 1.0
    lifted: bool = False
    after_norms: bool = False
    stored_bfloat16: bool = False
    groups: tuple[LayerGroup, ...] = ()
    states: tuple[StatePart, ...] = ()
    shared: tuple[tuple[int, int], ...] = ()
    packed: tuple[int, int] | None = None
    blocks: tuple[int, int] | None = None
    built: BuiltSizes | None = None

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """Every layer with KV of its own, in one of these."""
        every = tuple(range(self.layers))
        return self.groups or (LayerGroup(every, self.kv_heads, self.head_dim),)

    @property
    def num_parameters(self) -> int:
        """Parameters, tied embeddings counted once."""
        if self.built is not None:
            return self.built.parameters - (0 if self.has_lm_head else self.built.head)
        h, d = self.hidden, self.head_dim
        q, kv = self.heads * d, self.kv_heads * d
        norm = h if self.norm == "rms" else 2 * h
        attention = h * (q + 2 * kv) + q * h
        attention += (q + 2 * kv if self.qkv_bias else 0) + (h if self.out_bias else 0)
        attention += 2 * d if self.qk_norm else 0
        mlp = (3 if self.gated else 2) * h * self.intermediate
        if self.mlp_bias:
            mlp += (2 if self.gated else 1) * self.intermediate + h
        own_head = self.has_lm_head and not self.tied
        total = self.layers * (attention + mlp + (4 if self.after_norms else 2) * norm) + norm
        total += (2 if own_head else 1) * self.vocab * h
        if self.learned_positions is not None:
            total += (self.full_context + self.learned_positions) * h
        return total

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with: of experts, the ones that it takes."""
        idle = 0 if self.built is None else self.built.parameters - self.built.active
        return self.num_parameters - idle

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Rows and columns of all layers' projections, and how many there are of them.

        Of our own decoder: (fused) qkv, out, gate_up, down.
        """
        if self.built is not None:
            return self.built.matrices
        h, d, inner = self.hidden, self.head_dim, self.intermediate
        q, kv = self.heads * d, self.kv_heads * d
        sizes = ((q + 2 * kv, h), (h, q), ((2 if self.gated else 1) * inner, h), (h, inner))
        return tuple((*size, self.layers) for size in sizes)

    @property
    def in_blocks(self) -> bool:
        """Whether a GGUF file has all matrices in blocks: all others together are smaller."""
        smallest = min((rows * columns for rows, columns, _ in self.matrices), default=0)
        return self.blocks is not None and self.blocks[1] < smallest

    def working_bytes_per_row(self, element_bytes: int) -> int:
        """Estimate of what a decode step needs per row beside KV: activations, and logits five
        times in float32 (scores, scaled, filtered, with noise, as log-probabilities).

        Of a recurrent layer its state four times: as read, decayed, what is added, and the sum."""
        state = max((part.num_bytes(element_bytes) for part in self.states), default=0)
        return 5 * 4 * self.vocab + self.activation_width * element_bytes + 4 * state

    def head_bytes(self, element_bytes: int) -> int:
        """Working memory of a verifier's head on `HEAD_TOKENS`: logits, twice in float32, too."""
        return HEAD_TOKENS * self.vocab * (element_bytes + 2 * 4) if self.has_lm_head else 0

    @property
    def activation_width(self) -> int:
        """Estimate of the values that one token has in flight inside a layer."""
        mixed = max((part.size[0] for part in self.states if part.kind == "conv"), default=0)
        return 4 * self.hidden + 3 * max(self.intermediate, mixed)

    @property
    def reading_width(self) -> int:
        """The most that it has where many are read together: with what attention makes, which is
        there in the MLP, too, or while queries and keys are normalised and turned."""
        attended = (self.heads + self.kv_heads) * self.head_dim
        turned = (8 if self.qk_norm else 6) * attended
        return 4 * self.hidden + max(3 * self.intermediate + 2 * attended, turned)

    def kv_bytes_per_token(self, element_bytes: int, kv_dtype: KVDtype = "auto") -> int:
        """K and V of one token over all layers; element_bytes: where they are in no 8 bits."""
        return sum(group.bytes_per_token(element_bytes, kv_dtype) for group in self.kv_groups)

    def state_bytes(self, element_bytes: int) -> int:
        """States of one row over all recurrent layers, however long it is; 0 of plain models."""
        return sum(part.num_bytes(element_bytes) for part in self.states)


@dataclass(frozen=True)
class TensorNames:
    """What a family's checkpoints call their tensors: the model's prefix, then names in a layer."""

    prefix: str = "model."
    final_norm: str = "norm"
    attention_norm: str = "input_layernorm"
    qkv: Sequence[str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    after_attention: str = "post_attention_layernorm"
    after_mlp: str = "post_feedforward_layernorm"
    gate_up: Sequence[str] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


@dataclass(frozen=True)
class ModelFamily:
    """One `model_type`, declared in `shape.toml`.

    oddity: what a config has that the decoder does not, if it may have such.
    """

    reads: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tensors: TensorNames = TensorNames()
    window_if: str | None = None
    oddity: Callable[[Any], str | None] | None = None

    def flags(self, config: Any) -> dict[str, Any]:
        """Fields of ModelShape that are not read alike for all families.

        config: with no other keys than its family reads (`known.CONFIGS`); an empty one stands for
        a random shape.
        """
        found = dict(self.fixed)
        for name, (key, *default) in self.reads.items():
            value = getattr(config, key, default[0] if default else None)
            found[name] = bool(value) if default and isinstance(default[0], bool) else value
        return found

    def window(self, config: Any) -> int | None:
        """The sliding window that a config asks for."""
        is_used = self.window_if is None or getattr(config, self.window_if, False)
        return getattr(config, "sliding_window", None) if is_used else None


def _opt_oddity(config: Any) -> str | None:
    """What OPT-350m and Galactica have."""
    if config.word_embed_proj_dim != config.hidden_size:
        return "embeddings of another width"
    if not config.do_layer_norm_before or getattr(config, "_remove_final_layer_norm", False):
        return "norms behind the blocks"
    return None if config.layer_norm_elementwise_affine else "norms without weights"


def _gemma3_oddity(config: Any) -> str | None:
    """What the largest, and models that are derived from these, have."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    if any(getattr(config, name, None) for name in caps) or config.use_bidirectional_attention:
        return "soft caps, or attention to later tokens"
    same = config.query_pre_attn_scalar == config.head_dim
    return None if same else "scores of another scale"


_ODDITIES = {"opt": _opt_oddity, "gemma3_text": _gemma3_oddity}
FAMILIES = {
    name: ModelFamily(
        **{key: value for key, value in row.items() if key != "tensors"},
        oddity=_ODDITIES.get(name),
        tensors=TensorNames(**row.get("tensors", {})),
    )
    for name, row in read_beside(__file__).items()
}

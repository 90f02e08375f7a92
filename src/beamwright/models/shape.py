"""ModelShape: a model's dimensions and options, without weights; and the supported families.

Each family is one table in `shape.toml`. This module reads no model files and no weights (see
`hf_config` and `weights`) and needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from beamwright.errors import UnsupportedModelError
from beamwright.io import read_toml_beside
from beamwright.plan.blocks import aligned_tensor_bytes
from beamwright.sections import KVDtype

# A verifier's head computes logits for this many tokens at once, because each token's logits are as
# wide as the vocabulary.
HEAD_TOKENS = 256


class NoDecoderError(UnsupportedModelError):
    """The model is valid, but Beamwright does not implement it; another engine may."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers with equal KV sizes and the same kind of attention, such as one sliding window.

    layers: the numbers of the layers. Layers that read another layer's KV are left out.
    window: the number of tokens that a token attends to, including itself; None for all tokens.
    softcap: if set, attention scores become `softcap * tanh(score / softcap)`.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None

    def bytes_per_token(self, element_bytes: int, kv_dtype: KVDtype = "auto") -> int:
        """Return the bytes of one token's K and V in these layers, with the scales of 8-bit KV."""
        size = self.head_dim * element_bytes if kv_dtype == "auto" else self.head_dim + 1
        return 2 * len(self.layers) * self.kv_heads * size


@dataclass(frozen=True)
class StatePart:
    """One state tensor that a recurrent layer keeps per row, instead of KV.

    kind: "conv" (the last inputs of the convolution) or "recurrent".
    size: the tensor's size per row.
    wide: True if the tensor is float32, whatever the model's dtype is.
    """

    layer: int
    kind: str
    size: tuple[int, ...]
    wide: bool = False

    def num_bytes(self, element_bytes: int) -> int:
        """Return the bytes per row, with padding that aligns the next tensor of the record."""
        return aligned_tensor_bytes(self.size, 4 if self.wide else element_bytes)


@dataclass(frozen=True)
class BuiltSizes:
    """Sizes of a `transformers` model that do not follow from a dense decoder's dimensions.

    parameters: the number of parameters.
    active: the parameters that are used for one token.
    head: the parameters of the LM head, or 0 if it is tied.
    matrices: (rows, columns, count) of the projections that `--weights` quantises.
    by_layer: the number of parameters of each layer; () if layers are alike.
    experts: the parameters of all routed experts. num_experts: the number of these experts.
    """

    parameters: int
    active: int
    head: int
    matrices: tuple[tuple[int, int, int], ...]
    by_layer: tuple[int, ...] = ()
    experts: int = 0
    num_experts: int = 0


@dataclass(frozen=True)
class ModelShape:
    """A model's dimensions and options: what its config says, in Beamwright's terms.

    context: the longest path in tokens. full_context: the context the checkpoint was trained for.
    norm: "rms" or "layer"; applied before attention, before the MLP and after the last layer.
    activation: "silu", "relu", "gelu" or "gelu_tanh". gated: the MLP computes gate * up.
    learned_positions: the offset in OPT's position table; None for rotary positions.
    tied: the LM head is the embedding. has_lm_head: False for a reward model with its own head.
    stored_bfloat16: the checkpoint says that its weights are bfloat16.
    inv_freq: rotary inverse frequencies [head_dim / 2]. rope_scale: factor of cos and sin (YaRN).
    local_layers, local_freq: sliding layers with other inverse frequencies than `inv_freq`, and
        those frequencies (Gemma 3).
    embed_scale: the factor of embedding rows. unit_offset: 1 is added to stored norm weights.
    after_norms: the outputs of attention and MLP are normalised before they are added.
    groups: layers grouped by their attention; () if all layers attend to all tokens alike.
    states: the states of recurrent layers, in the order in which a row's record stores them.
    shared: (layer, source) for each layer that reads the KV of another layer, its source.
    packed: for a quantised checkpoint, (bytes, values): the bytes of the projections that stay
        quantised, and the number of values in the others. None for a plain checkpoint.
    blocks: for a GGUF file, (bytes, values, head): the bytes of the blocks that the C library
        multiplies, the number of values in all other tensors, and the bytes of the LM head's
        blocks. None for other files.
    built: the sizes of a model that `transformers` builds; None for Beamwright's own decoder.
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
    local_freq: tuple[float, ...] = ()
    local_layers: tuple[int, ...] = ()
    embed_scale: float = 1.0
    unit_offset: bool = False
    after_norms: bool = False
    stored_bfloat16: bool = False
    groups: tuple[LayerGroup, ...] = ()
    states: tuple[StatePart, ...] = ()
    shared: tuple[tuple[int, int], ...] = ()
    packed: tuple[int, int] | None = None
    blocks: tuple[int, int, int] | None = None
    built: BuiltSizes | None = None

    @property
    def kv_layer_groups(self) -> tuple[LayerGroup, ...]:
        """The groups of all layers that have their own KV."""
        every = tuple(range(self.layers))
        return self.groups or (LayerGroup(every, self.kv_heads, self.head_dim),)

    @property
    def num_parameters(self) -> int:
        """The number of parameters; a tied embedding counts once."""
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
        """The number of parameters used for one token: only the experts it is routed to."""
        idle = 0 if self.built is None else self.built.parameters - self.built.active
        return self.num_parameters - idle

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """(rows, columns, count) of the projections in all layers.

        Beamwright's own decoder has fused qkv, out, gate_up and down.
        """
        if self.built is not None:
            return self.built.matrices
        h, d, inner = self.hidden, self.head_dim, self.intermediate
        q, kv = self.heads * d, self.kv_heads * d
        sizes = ((q + 2 * kv, h), (h, q), ((2 if self.gated else 1) * inner, h), (h, inner))
        return tuple((*size, self.layers) for size in sizes)

    @property
    def is_gguf_quantised(self) -> bool:
        """True if the model is a GGUF file with all matrices in quantised blocks.

        Sizes show it: the values outside blocks are too few for even the smallest matrix.
        """
        smallest = min((rows * columns for rows, columns, _ in self.matrices), default=0)
        return self.blocks is not None and self.blocks[1] < smallest

    def working_bytes_per_row(self, element_bytes: int) -> int:
        """Estimate a decode step's working memory per row, without KV.

        This memory holds the activations and five float32 copies of the logits: raw, scaled,
        filtered, with noise, and as log-probabilities. A recurrent layer needs four copies of its
        state: as read, decayed, the addend, and the sum.
        """
        state = max((part.num_bytes(element_bytes) for part in self.states), default=0)
        return 5 * 4 * self.vocab + self.activation_width * element_bytes + 4 * state

    def logits_bytes(self, element_bytes: int) -> int:
        """Return the bytes that a verifier needs for the logits of `HEAD_TOKENS` tokens.

        These are the logits and two float32 copies; 0 for a model without an LM head.
        """
        return HEAD_TOKENS * self.vocab * (element_bytes + 2 * 4) if self.has_lm_head else 0

    @property
    def activation_width(self) -> int:
        """Number of intermediate values per token inside a layer while decoding (an estimate)."""
        mixed = max((part.size[0] for part in self.states if part.kind == "conv"), default=0)
        return 4 * self.hidden + 3 * max(self.intermediate, mixed)

    @property
    def prefill_width(self) -> int:
        """Number of intermediate values per token inside a layer in a prefill (an estimate).

        The peak is either in the MLP, while attention's outputs are still in memory, or where
        queries and keys are normalised and rotated.
        """
        attended = (self.heads + self.kv_heads) * self.head_dim
        turned = (8 if self.qk_norm else 6) * attended
        return 4 * self.hidden + max(3 * self.intermediate + 2 * attended, turned)

    def kv_bytes_per_token(self, element_bytes: int, kv_dtype: KVDtype = "auto") -> int:
        """Return the bytes of one token's K and V over all layers.

        element_bytes: bytes of an element if `kv_dtype` is "auto".
        """
        return sum(group.bytes_per_token(element_bytes, kv_dtype) for group in self.kv_layer_groups)

    def state_bytes(self, element_bytes: int) -> int:
        """Return the bytes of a row's states over all recurrent layers; 0 without such layers."""
        return sum(part.num_bytes(element_bytes) for part in self.states)


@dataclass(frozen=True)
class TensorNames:
    """Tensor names in the checkpoints of a family: the prefix, the final norm, and per layer."""

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
    """How configs and tensors of one `model_type` are read, as declared in `shape.toml`.

    reads: for fields of ModelShape, the config key and, optionally, its default.
    fixed: fields of ModelShape with a constant value.
    tensors: the family's tensor names.
    window_if: the config key that enables the sliding window; None if it is always enabled.
    unsupported: returns the name of a feature in a config that the decoder lacks, or None.
    """

    reads: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tensors: TensorNames = TensorNames()
    window_if: str | None = None
    unsupported: Callable[[Any], str | None] | None = None

    def shape_fields(self, config: Any) -> dict[str, Any]:
        """Return the fields of ModelShape that `reads` and `fixed` define.

        config: an object with only the keys that the family reads (`known.CONFIGS`); an empty one
            for a random shape.
        """
        fields = dict(self.fixed)
        for name, (key, *default) in self.reads.items():
            value = getattr(config, key, default[0] if default else None)
            fields[name] = bool(value) if default and isinstance(default[0], bool) else value
        return fields

    def window(self, config: Any) -> int | None:
        """Return the size of a config's sliding window in tokens; None if it is not used."""
        is_used = self.window_if is None or getattr(config, self.window_if, False)
        return getattr(config, "sliding_window", None) if is_used else None


def _opt_unsupported(config: Any) -> str | None:
    """Return a feature of OPT-350m or Galactica that the decoder does not support, or None."""
    if config.word_embed_proj_dim != config.hidden_size:
        return "embeddings of another width than the layers"
    if not config.do_layer_norm_before or getattr(config, "_remove_final_layer_norm", False):
        return "norms after the blocks"
    return None if config.layer_norm_elementwise_affine else "norms without weights"


def _gemma3_unsupported(config: Any) -> str | None:
    """Return a feature of Gemma 3 27B or a derived model that the decoder does not support."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    if any(getattr(config, name, None) for name in caps) or config.use_bidirectional_attention:
        return "soft caps or bidirectional attention"
    same = config.query_pre_attn_scalar == config.head_dim
    return None if same else "another scale of attention scores"


_UNSUPPORTED = {"opt": _opt_unsupported, "gemma3_text": _gemma3_unsupported}
FAMILIES = {
    name: ModelFamily(
        **{key: value for key, value in row.items() if key != "tensors"},
        unsupported=_UNSUPPORTED.get(name),
        tensors=TensorNames(**row.get("tensors", {})),
    )
    for name, row in read_toml_beside(__file__).items()
}

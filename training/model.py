"""A Llama-shaped decoder whose state dict carries Hugging Face's names, and its sampler.

About 0.85 M parameters, so that two cores train it. `transformers` reads what `save` writes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.eps = shape.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in Hugging Face's half-and-half layout; x: (batch, heads, time, dim)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Cache:
    """Keys and values of a batch, preallocated; `used` columns are filled."""

    def __init__(self, shape: Shape, batch: int, columns: int) -> None:
        size = (shape.num_hidden_layers, 2, batch, shape.num_key_value_heads, columns)
        self.data = torch.zeros(*size, shape.head_dim)
        self.used = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write new columns of one layer and return all filled ones."""
        end = self.used + k.shape[2]
        self.data[layer, 0, :, :, self.used : end] = k
        self.data[layer, 1, :, :, self.used : end] = v
        return self.data[layer, 0, :, :, :end], self.data[layer, 1, :, :, :end]


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, d = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(h, shape.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(h, shape.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(h, shape.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(h, h, bias=False)
        self.head_dim = d

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        kv: tuple[Cache | None, int],
    ) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            f(x).view(batch, time, -1, self.head_dim).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *rope), rotate(k, *rope)
        cache, layer = kv
        if cache is not None:
            k, v = cache.extend(layer, k, v)
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, time, -1))
        return result


class MLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, m = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(h, m, bias=False)
        self.up_proj = nn.Linear(h, m, bias=False)
        self.down_proj = nn.Linear(m, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = Norm(shape)
        self.post_attention_layernorm = Norm(shape)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        kv: tuple[Cache | None, int],
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, kv)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape)


class Decoder(nn.Module):
    """The language model, with tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        frequency = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(
            torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-frequency
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=std)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Hidden states after the final norm; ids: (batch, time), padded on the right."""
        if positions is None:
            rope = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        else:
            rope = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = self.model.embed_tokens(ids)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, rope, mask, (cache, index))
        if cache is not None:
            cache.used += ids.shape[1]
        result: Tensor = self.model.norm(x)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of hidden states."""
        return F.linear(hidden, self.model.embed_tokens.weight)


def config_of(shape: Shape, bos: int, eos: int, pad: int) -> dict[str, object]:
    """The Hugging Face config of a shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "float16",
    }


def save(model: Decoder, folder: Path, special: tuple[int, int, int]) -> None:
    """Write config.json, generation_config.json and float16 model.safetensors."""
    bos, eos, pad = special
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.detach().half().contiguous() for name, t in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 1.0,
    }
    for name, content in (
        ("config.json", config_of(model.shape, *special)),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> Decoder:
    """Read a folder that `save` wrote, into float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
    model = Decoder(shape)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: t.float() for name, t in weights.items()})
    return model.eval()


@torch.no_grad()
def sample(
    model: Decoder,
    prompts: list[list[int]],
    *,
    stops: frozenset[int],
    temperature: float,
    generator: torch.Generator,
    pad: int,
    max_new: int = 320,
    batch: int = 256,
) -> list[list[int]]:
    """Continue each prompt to its first stop token (kept) or to `max_new` tokens."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: list[list[int]] = [[] for _ in prompts]
    for begin in range(0, len(order), batch):
        part = order[begin : begin + batch]
        chunk = [prompts[i] for i in part]
        new = _sample_batch(model, chunk, stops, temperature, generator, pad, max_new)
        for index, tokens in zip(part, new, strict=True):
            outputs[index] = tokens
    return outputs


def _sample_batch(
    model: Decoder,
    prompts: list[list[int]],
    stops: frozenset[int],
    temperature: float,
    generator: torch.Generator,
    pad: int,
    max_new: int,
) -> list[list[int]]:
    """One batch, padded on the left; finished rows leave the batch when half of it is done."""
    width = max(map(len, prompts))
    max_new = min(max_new, model.shape.max_position_embeddings - width)
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    pads = torch.tensor([width - len(p) for p in prompts])
    cache = Cache(model.shape, len(prompts), width + max_new)
    columns = torch.arange(width + max_new)
    positions = (columns[:width] - pads[:, None]).clamp(min=0)
    visible = columns[:width] >= pads[:, None, None]
    causal = columns[:width, None] >= columns[:width]
    own = torch.eye(width, dtype=torch.bool)
    hidden = model(ids, positions, ((visible & causal) | own)[:, None], cache)[:, -1]
    rows = list(range(len(prompts)))
    alive = torch.ones(len(prompts), dtype=torch.bool)
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(max_new):
        logits = model.logits(hidden)
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            noise = torch.empty_like(logits).exponential_(generator=generator)
            token = (logits / temperature - noise.log()).argmax(-1)
        for row, (index, value) in enumerate(zip(rows, token.tolist(), strict=True)):
            if alive[row]:
                outputs[index].append(value)
                alive[row] = value not in stops
        if not alive.any():
            break
        if alive.sum() * 2 < len(rows):
            keep = alive.nonzero()[:, 0]
            rows, token, pads = [rows[i] for i in keep.tolist()], token[keep], pads[keep]
            cache.data = cache.data[:, :, keep]
            alive = alive[keep]
        at = width + step
        seen = (columns[: at + 1] >= pads[:, None])[:, None, None]
        hidden = model(token[:, None], at - pads[:, None], seen, cache)[:, -1]
    return outputs

"""`transformers` as a peer: loops that decode n paths, `generate`, and search steps as text."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer


def load_model(folder: Path, dtype: str = "float32") -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    return model.eval()


def sample_tokens(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Sample a token per row, [rows, 1], from logits [rows, vocab]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1)


def cache_bytes(cache: Any) -> int:
    """Return the bytes of the cached KV, without preallocated room."""
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


# --- n paths from one prompt -----------------------------------------------------------------


class PreallocatedLayer(DynamicLayer):
    """A cache layer allocated once for its final length: a new token does not copy older ones."""

    def __init__(self, prompt: DynamicLayer, num_rows: int, num_new: int) -> None:
        super().__init__()
        self.dtype, self.device = prompt.keys.dtype, prompt.keys.device
        self.is_initialized = True
        self._length = prompt.keys.shape[2]
        self._keys = _with_room(prompt.keys, num_rows, num_new)
        self._values = _with_room(prompt.values, num_rows, num_new)
        self._show()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self._length + key_states.shape[2]
        self._keys[:, :, self._length : end] = key_states
        self._values[:, :, self._length : end] = value_states
        self._length = end
        self._show()
        return self.keys, self.values

    def _show(self) -> None:
        self.keys = self._keys[:, :, : self._length]
        self.values = self._values[:, :, : self._length]


def _with_room(prompt: torch.Tensor, num_rows: int, num_new: int) -> torch.Tensor:
    _, heads, length, head_dim = prompt.shape
    room = prompt.new_zeros(num_rows, heads, length + num_new, head_dim)
    room[:, :, :length] = prompt
    return room


def cache_argument(model: Any, cache: DynamicCache) -> dict[str, DynamicCache]:
    """Return the cache as argument of `forward`, whose name changed in transformers 5.24."""
    known = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache}


@torch.inference_mode()
def repeat_cache_paths(
    model: Any, prompt: Sequence[int], n: int, num_new: int, temperature: float
) -> tuple[torch.Tensor, int]:
    """Prefill once, repeat the cache, and decode n rows together.

    Returns the tokens [n, num_new] and the bytes of the cache.
    """
    cache = DynamicCache(config=model.config)
    held = cache_argument(model, cache)
    out = model(torch.tensor([list(prompt)]), logits_to_keep=1, **held)
    cache.layers = [PreallocatedLayer(layer, n, num_new) for layer in cache.layers]
    tokens = [sample_tokens(out.logits[:, -1].expand(n, -1), temperature)]
    for _ in range(num_new - 1):
        out = model(tokens[-1], **held)
        tokens.append(sample_tokens(out.logits[:, -1], temperature))
    return torch.cat(tokens, dim=1), cache_bytes(cache)


@torch.inference_mode()
def generate_paths(
    model: Any, prompt: Sequence[int], n: int, num_new: int, temperature: float
) -> torch.Tensor:
    """Return tokens [n, num_new] of `generate(num_return_sequences=n)`.

    It prefills the prompt n times.
    """
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        num_return_sequences=n,
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        pad_token_id=0,
    )
    return out[:, ids.shape[1] :]


# --- one step of many texts ------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The decoded continuation of a text.

    stop: "delimiter", "eos" or "length".
    """

    text: str
    stop: str
    num_tokens: int


class TransformersStepper:
    """Decodes the next step of many texts: a left-padded prefill, then a loop.

    Stopped rows are removed when they are half of the batch.
    """

    def __init__(self, folder: Path, temperature: float, delimiter: str, max_tokens: int) -> None:
        self.model = load_model(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._temperature, self._max_tokens = temperature, max_tokens
        self._context = self.model.config.max_position_embeddings
        assert delimiter == "\n\n", "only a blank line is supported as delimiter"
        pieces = [self.tokenizer.decode([i]) for i in range(len(self.tokenizer))]
        self._has = torch.tensor([delimiter in piece for piece in pieces])
        self._begins = torch.tensor([piece.startswith("\n") for piece in pieces])
        self._ends = torch.tensor([piece.endswith("\n") for piece in pieces])

    @torch.inference_mode()
    def step(self, texts: Sequence[str]) -> list[Step]:
        ids = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        longest = max(map(len, ids))
        padded = [[0] * (longest - len(row)) + row for row in ids]
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
        most = min(self._max_tokens, self._context - longest)
        return self._decode(torch.tensor(padded), mask, most)

    def _decode(self, tokens: torch.Tensor, mask: torch.Tensor, most: int) -> list[Step]:
        num_rows, eos = len(tokens), self.tokenizer.eos_token_id
        written: list[list[int]] = [[] for _ in range(num_rows)]
        stops = ["length"] * num_rows
        rows = torch.arange(num_rows)
        going = torch.ones(num_rows, dtype=torch.bool)
        ended_in_newline = torch.zeros(num_rows, dtype=torch.bool)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        for _ in range(most):
            out = self.model(
                tokens,
                attention_mask=mask,
                position_ids=positions,
                logits_to_keep=1,
                **cache_argument(self.model, cache),
            )
            tokens = sample_tokens(out.logits[:, -1], self._temperature)
            drawn = tokens[:, 0]
            hit = self._has[drawn] | (ended_in_newline & self._begins[drawn])
            ended_in_newline = self._ends[drawn]
            for row, token, go, cut in zip(
                rows.tolist(), drawn.tolist(), going.tolist(), hit.tolist(), strict=True
            ):
                if go:
                    written[row].append(token)
                    if token == eos:
                        stops[row] = "eos"
                    elif cut:
                        stops[row] = "delimiter"
            going = going & ~hit & (drawn != eos)
            left = int(going.sum())
            if not left:
                break
            positions = positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            if 2 * left <= len(going):
                kept = going.nonzero().flatten()
                cache.batch_select_indices(kept)
                tokens, mask, positions = tokens[kept], mask[kept], positions[kept]
                rows, ended_in_newline, going = rows[kept], ended_in_newline[kept], going[kept]
        decoded = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        return [
            Step(text, stop, len(ids))
            for text, stop, ids in zip(decoded, stops, written, strict=True)
        ]

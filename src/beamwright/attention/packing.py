"""Packed tokens (for matrix products) to padded rows (for attention), and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from beamwright.attention.partial import KEY_MULTIPLE, round_up


class Packing:
    """Index tables between [tokens] packed path after path and [rows, padded tokens].

    Rows are padded to a multiple of 16 tokens: they are queries and keys at once, see `partial`.
    Packed tokens beyond the sum
    of `lengths` are padding of the batch and belong to no row.
    """

    def __init__(self, lengths: Sequence[int], num_kv_heads: int, device: torch.device) -> None:
        self.num_rows = len(lengths)
        self.num_padded = round_up(max(lengths), KEY_MULTIPLE)
        self.num_kv_heads = num_kv_heads
        starts = torch.tensor([0, *lengths], device=device).cumsum(0)[:-1].unsqueeze(1)
        count = torch.tensor(list(lengths), device=device).unsqueeze(1)
        steps = torch.arange(self.num_padded, device=device)
        # Padding reads the row's last token: any finite value will do.
        self.packed_of_padded = (starts + torch.minimum(steps, count - 1)).flatten()
        self.padded_of_packed = (steps < count).flatten().nonzero().squeeze(1)

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] to [rows, padded, ...]."""
        picked = packed.index_select(0, self.packed_of_padded)
        return picked.view(self.num_rows, self.num_padded, *packed.shape[1:])

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] to [rows, kv_heads, padded * group, head_dim]."""
        padded = self.pad(query).unflatten(2, (self.num_kv_heads, -1))
        queries: torch.Tensor = padded.permute(0, 2, 1, 3, 4).flatten(2, 3)
        return queries

    def unpack(self, context: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """[rows, padded * group, kv_heads, head_dim] to [tokens, heads, head_dim]."""
        by_token = context.unflatten(1, (self.num_padded, -1)).transpose(2, 3).flatten(0, 1)
        picked: torch.Tensor = by_token.index_select(0, self.padded_of_packed).flatten(1, 2)
        if picked.shape[0] == like.shape[0]:
            return picked
        out = torch.zeros_like(like)
        out[: picked.shape[0]] = picked
        return out

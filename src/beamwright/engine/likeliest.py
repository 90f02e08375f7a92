"""The likeliest tokens beside each one that is drawn, for rows that ask for them.

Apart from sampling, so that nobody's tokens depend on it, and computed where somebody asks only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from beamwright.tree import TopTokens

MOST = 20  # of one token; who asks for fewer gets the first of them
_AT_A_TIME = 16  # rows: their keys are twice as long as logits in float32


def likeliest(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [rows, MOST] and log-probabilities [rows, MOST] of the likeliest tokens, in their order.

    logits: [rows, vocab], untempered and unfiltered; ids at or above num_tokens are none. Of equal
    ones the lower id comes first. As many as there are, where those are fewer.
    """
    parts = [_likeliest(part[:, :num_tokens]) for part in logits.split(_AT_A_TIME)]
    ids, logprobs = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logprobs)


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = logits.float().log_softmax(-1)
    # None is above 0, so the bits of their magnitudes are in their order; no two keys are equal.
    keys = logprobs.abs().view(torch.int32).long() << 32
    keys |= torch.arange(keys.shape[1], device=keys.device)
    first = keys.topk(min(MOST, keys.shape[1]), dim=-1, largest=False).values
    ids = first & 0xFFFFFFFF
    return ids, logprobs.gather(1, ids)


class LikeliestBuffers:
    """What an iteration finds of every token: ids and log-probabilities [step, row, rank].

    everyone: all rows are looked at where one asks, since a captured step has its shapes; otherwise
    only those that ask. Allocated for who asks first, and never moved.
    asked: some row is to know.
    """

    def __init__(self, num_steps: int, num_rows: int, *, everyone: bool) -> None:
        self._size, self._everyone, self.asked = (num_steps, num_rows), everyone, False
        self._wanted: dict[int, int] = {}
        self._places = self._ids = self._logprobs = torch.empty(0)

    def load(self, wanted: Sequence[int], device: torch.device) -> None:
        """Go on with rows that want so many each."""
        self._wanted = {place: count for place, count in enumerate(wanted) if count}
        self.asked = bool(self._wanted)
        if not self.asked:
            return
        if not len(self._ids):
            self._ids = torch.zeros(*self._size, MOST, dtype=torch.long, device=device)
            self._logprobs = torch.zeros(*self._size, MOST, device=device)
        if not self._everyone:
            self._places = torch.tensor([*self._wanted], device=device)

    def keep(self, logits: torch.Tensor, num_tokens: int, index: torch.Tensor) -> None:
        """What may be drawn from logits [rows, vocab], as step number `index` [1]."""
        if not self.asked:
            return
        if not self._everyone:
            logits = logits[self._places]
        ids, logprobs = likeliest(logits, num_tokens)
        for kept, found in ((self._ids, ids), (self._logprobs, logprobs)):
            at = kept[..., : found.shape[-1]]
            if self._everyone:
                at.index_copy_(0, index, found.unsqueeze(0))
            else:
                at[index, self._places] = found

    def found(self, num_steps: int) -> dict[int, list[TopTokens]]:
        """What rows that ask are to know of the first steps' tokens, by place."""
        if not self.asked:
            return {}
        places = [*self._wanted]
        ids, logprobs = (each[:num_steps, places].tolist() for each in (self._ids, self._logprobs))
        return {
            place: [
                tuple(zip(ids[step][row][:count], logprobs[step][row][:count], strict=True))
                for step in range(num_steps)
            ]
            for row, (place, count) in enumerate(self._wanted.items())
        }

"""Batched sampling (temperature, top-k, top-p, min-p, greedy), and statistics of each token.

Sampling is Gumbel-max with the random numbers of `noise`. The rows of a batch may differ in all
settings. A pass reads its settings from tensors at fixed addresses, so that a captured pass can be
replayed. Statistics and the most likely tokens are computed apart from sampling, so that no sampled
token depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from beamwright.attention.kernels import why_no_kernels
from beamwright.engine.endings import ThoughtClosing, ThoughtClosings
from beamwright.engine.noise import (
    Logits,
    RowSampler,
    gumbel_noise,
    half_spread,
    row_words,
    spread_tokens,
)
from beamwright.kv.streams import send_to_device
from beamwright.models.decoder import apply_in_tiles
from beamwright.protocols import SAMPLING_MASS
from beamwright.sections import SamplingSettings

MOST_LIKELIEST = 20  # number of most likely tokens kept per position; a request may take fewer
_LIKELIEST = 20  # number of most likely tokens that DeepConf's confidence is computed from
_LARGE_VOCAB = 16384  # vocabulary size from which a CPU samples row by row
_ROWS_OF_THREAD = 2  # minimum number of rows per thread
_AT_A_TIME = 16  # rows ranked at once; few, because int64 keys take twice the logits' memory


# --- parameters -----------------------------------------------------------------------------------


class SamplingFlags(NamedTuple):
    """Flags that say which parts of sampling to compute: those that some row of the batch needs.

    draws: some row samples randomly. is_greedy: some row takes its most likely token.
    likeliest: number of tokens that top-k must rank for the largest k; 0 for none.
    top_p, min_p: some row uses this filter.
    closes: forced tokens may replace sampled ones (`endings`).
    """

    draws: bool
    is_greedy: bool
    likeliest: int
    top_p: bool
    min_p: bool
    closes: bool = False

    @property
    def filters(self) -> bool:
        """True if some row samples from fewer than all tokens."""
        return bool(self.likeliest or self.top_p or self.min_p)


class RowSampling:
    """Sampling parameters of all rows as tensors: `greedy` [rows], the others [rows, 1].

    A filter that a row does not use has a value that keeps all tokens.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.greedy = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.top_k = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self._numbers = torch.ones(3, num_rows, 1, device=device)
        self.temperature, self.top_p, self.min_p = self._numbers
        self.closings = ThoughtClosings(num_rows, device)
        self.flags = SamplingFlags(True, False, 0, False, False)

    @classmethod
    def of(cls, rows: Sequence[SamplingSettings], device: torch.device) -> RowSampling:
        """Create the parameters of rows with these settings."""
        made = cls(len(rows), device)
        made.load(rows, [False] * len(rows))
        return made

    def load(
        self,
        rows: Sequence[SamplingSettings],
        greedy: Sequence[bool],
        closings: Sequence[ThoughtClosing | None] = (),
    ) -> None:
        """Copy the settings of all rows to the device.

        greedy: True for rows that take the most likely token regardless of their settings.
        closings: the forced end of each row's thought, if any.
        """
        self.closings.load(closings)
        likeliest = [g or row.temperature == 0 for row, g in zip(rows, greedy, strict=True)]
        drawing = {id(row): row for row, g in zip(rows, likeliest, strict=True) if not g}.values()
        top_k = max((row.top_k or 0 for row in drawing), default=0)
        self.flags = SamplingFlags(
            draws=bool(drawing),
            is_greedy=any(likeliest),
            # Rounded up to a power of two, so that few different passes are captured.
            likeliest=1 << (top_k - 1).bit_length() if top_k else 0,
            top_p=any(row.top_p < 1.0 for row in drawing),
            min_p=any(row.min_p is not None for row in drawing),
            closes=self.closings.any,
        )
        numbers = [
            [row.temperature or 1.0 for row in rows],
            # Infinity turns top-p off. 1 would not, because rounded sums may exceed it.
            [row.top_p if row.top_p < 1.0 else torch.inf for row in rows],
            [row.min_p or 0.0 for row in rows],
        ]
        device = self.greedy.device
        self.greedy.copy_(send_to_device(likeliest, device))
        self.top_k.copy_(send_to_device([[row.top_k or 0] for row in rows], device))
        self._numbers.copy_(send_to_device(numbers, device).unsqueeze(2))

    def select_rows(self, rows: Tensor) -> RowSampling:
        """Return the parameters of the rows with the indices `rows`, which may repeat."""
        made = copy(self)
        made.greedy, made.top_k = self.greedy[rows], self.top_k[rows]
        made._numbers = self._numbers[:, rows]
        made.temperature, made.top_p, made.min_p = made._numbers
        made.closings = self.closings.select_rows(rows) if self.closings.any else self.closings
        return made

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that sampling reads, with rows as their first dimension."""
        return self.greedy, self.temperature, self.top_k, self.top_p, self.min_p


# --- statistics -----------------------------------------------------------------------------------


def entropy(logprobs: Tensor) -> Tensor:
    """Return the entropy in nats [rows] of log-probabilities [rows, tokens].

    Tokens of probability 0 add nothing.
    """
    terms: Tensor = torch.special.entr(logprobs.exp())
    return terms.sum(-1)


def confidence(logprobs: Tensor) -> Tensor:
    """Return DeepConf's token confidence [rows] of log-probabilities [rows, tokens].

    It is the negative mean log-probability of the 20 most likely tokens, as in the published code:
    the surer the model is of one token, the less likely are the others. It is at least log(20).
    """
    return -logprobs.topk(min(_LIKELIEST, logprobs.shape[-1]), dim=-1).values.mean(-1)


def sampling_mass(
    flags: SamplingFlags, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor,
    min_p: Tensor,
) -> Tensor:  # fmt: skip
    """Return the log [rows] of the sum of p ** (1 / temperature) over the tokens that may be drawn.

    p is a token's probability at temperature 1. A drawn token's log-probability under the sampling
    distribution is thus log(p) / temperature minus this value.

    logits: [rows, tokens]; the parameters are those of `RowSampling`.
    """
    scaled = logits.float().log_softmax(-1) / temperature
    return filter_logits(scaled, flags, top_k, top_p, min_p).logsumexp(-1)


# Statistics by name: functions from log-probabilities [rows, tokens] to values [rows].
TOKEN_STATS: dict[str, Callable[[Tensor], Tensor]] = {"entropy": entropy, "confidence": confidence}


def likeliest(logits: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [rows, MOST_LIKELIEST] of the most likely tokens, in order.

    Among equally likely tokens the lower id comes first. Smaller vocabularies give fewer columns.

    logits: [rows, vocab], untempered and unfiltered; ids from `num_tokens` on are left out.
    """
    parts = [_likeliest(part[:, :num_tokens]) for part in logits.split(_AT_A_TIME)]
    ids, logprobs = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logprobs)


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = logits.float().log_softmax(-1)
    # Log-probabilities are at most 0, so the bits of their magnitudes, read as integers, rise as
    # the values fall. The token id in the lower half makes all keys distinct.
    keys = logprobs.abs().view(torch.int32).long() << 32
    keys |= torch.arange(keys.shape[1], device=keys.device)
    first = keys.topk(min(MOST_LIKELIEST, keys.shape[1]), dim=-1, largest=False).values
    ids = first & 0xFFFFFFFF
    return ids, logprobs.gather(1, ids)


def _to_float32(logits: Tensor) -> Logits:
    """Convert CPU logits to a float32 array.

    A bfloat16 is the upper half of a float32, so the conversion needs none of torch's threads.
    """
    if logits.dtype != torch.bfloat16:
        return logits.float().numpy()
    bits = logits.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


# --- sampling -------------------------------------------------------------------------------------


class Sampler:
    """Sampler of one token per row, for batches on any device.

    num_tokens: ids from this number on are never sampled (rows of the LM head without a token).
    token_stats: names of the statistics, from `TOKEN_STATS`, that `stats` computes.
    tile_rows: see `models.decoder.Decoder`.
    captured: True if passes are captured, so the host must read nothing during a pass.
    fused: True if kernels sample (`draw_kernel`; see `samples_in_kernel`).

    On a CPU, rows of a large vocabulary are sampled one at a time, so that a row stays in the
    cache. Only the tokens that can win are computed, in as many threads as torch has. The result is
    bitwise equal to sampling all rows at once.

    Raises:
        KeyError: if a statistic is not in `TOKEN_STATS`.
    """

    def __init__(
        self,
        num_tokens: int,
        device: torch.device,
        token_stats: Collection[str] = (),
        tile_rows: int | None = None,
        *,
        captured: bool = False,
        fused: bool = False,
    ) -> None:
        self.num_tokens, self._tile_rows = num_tokens, tile_rows
        self._fused: Callable[..., tuple[Tensor, Tensor]] | None = None
        if fused:
            from beamwright.engine.draw_kernel import draw  # noqa: PLC0415 (loads Triton)

            self._fused = draw
        large = num_tokens >= _LARGE_VOCAB and device.type == "cpu"
        self._by_row = large and not captured and not fused
        self._keeps_mass = SAMPLING_MASS in token_stats
        names = sorted(name for name in token_stats if name != SAMPLING_MASS)
        self._stats = {name: TOKEN_STATS[name] for name in names}
        self._spread = spread_tokens(torch.arange(num_tokens, device=device))
        if self._by_row:
            self._half = half_spread(self._spread)

    def sample(
        self,
        logits: Tensor,
        keys: Tensor,
        positions: Tensor,
        how: RowSampling,
        unread: Collection[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Sample a token of every row; return ids [rows] and log-probabilities [rows].

        Log-probabilities ignore temperature and filters.

        logits: [rows, vocab].
        keys: [rows, 2], random keys from `noise.lineage_key`.
        positions: [rows], the positions of the sampled tokens.
        how: the rows' parameters.
        unread: rows whose token is not needed; sampling row by row returns token 0 for them.
        """
        rows = (known := logits[:, : self.num_tokens], keys, positions, *how.tensors)
        if self._by_row:
            tokens, logprobs = self._sample_by_row(how.flags, unread, rows)
        elif self._fused is None:
            tokens, logprobs = apply_in_tiles(
                self._tile_rows, partial(self._sample, how.flags), *rows
            )
        else:
            tokens, logprobs = self._fused(*(rows if how.flags.filters else rows[:5]))
        if how.flags.closes:
            return how.closings.apply_closings(known, positions, tokens, logprobs)
        return tokens, logprobs

    def _sample_by_row(
        self, flags: SamplingFlags, unread: Collection[int], rows: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        logits, keys, positions, *parameters = rows
        words = torch.stack(row_words(keys, positions), dim=1).tolist()
        numbers = [*zip(*(values.flatten().tolist() for values in parameters), strict=True)]
        read = [row for row in range(len(logits)) if row not in unread]

        @torch.inference_mode()
        def draw(share: Sequence[int]) -> list[tuple[int, float] | None]:
            return [self._sample_row(logits[row], words[row], *numbers[row]) for row in share]

        # Top-p sums whole rows, and torch uses all threads for that.
        threads = 1 if flags.top_p else min(torch.get_num_threads(), len(read) // _ROWS_OF_THREAD)
        if threads > 1:
            # One task per thread, because one per row would cost 4 % of a small model's pass.
            shares = [read[first::threads] for first in range(threads)]
            with ThreadPoolExecutor(threads) as pool:
                pairs = [*chain(*zip_longest(*pool.map(draw, shares)))]
        else:
            pairs = draw(read)
        chosen = torch.zeros(len(logits), dtype=torch.long)
        logprobs = torch.zeros(len(logits))
        for row, pair in zip(read, pairs, strict=False):
            if pair is not None:
                chosen[row], logprobs[row] = pair
                continue
            one, is_greedy = slice(row, row + 1), numbers[row][0]
            alone = flags._replace(is_greedy=is_greedy, draws=not is_greedy)
            chosen[one], logprobs[one] = self._sample(alone, *(values[one] for values in rows))
        return chosen, logprobs

    def _sample_row(
        self, logits: Tensor, words: tuple[int, int], is_greedy: bool, *way: Any
    ) -> tuple[int, float] | None:
        """Sample one row without computing all of it; return its token and log-probability.

        None if the whole row must be computed.
        """
        mine = _to_float32(logits)
        token: int | None = int(mine.argmax())
        if not is_greedy:
            token = RowSampler(mine, words, self._half, *way).sample()
        elif not math.isfinite(mine[token]):
            token = None
        if token is None:
            return None
        return token, float(torch.from_numpy(mine).log_softmax(-1)[token])

    def _sample(
        self,
        flags: SamplingFlags,
        logits: Tensor,
        keys: Tensor,
        positions: Tensor,
        greedy: Tensor,
        temperature: Tensor,
        *filters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        if not flags.draws:
            chosen = logits.argmax(-1)
        else:
            allowed = filter_logits(logits / temperature, flags, *filters)
            chosen = gumbel_noise(keys, positions, self._spread).add_(allowed).argmax(-1)
            if flags.is_greedy:
                chosen = torch.where(greedy, logits.argmax(-1), chosen)
        logprobs = logits.log_softmax(-1).gather(1, chosen.unsqueeze(1)).squeeze(1)
        return chosen, logprobs

    def stats(self, logits: Tensor, how: RowSampling) -> dict[str, Tensor]:
        """Return the statistics [rows] by name.

        All but the sampling mass are of the distribution before temperature and filters.

        logits: [rows, vocab]; it may have more rows than `how`.
        """
        mass: dict[str, Tensor] = {}
        if self._keeps_mass:
            parameters = how.tensors[1:]
            rows = logits[: len(how.greedy), : self.num_tokens], *parameters
            mass[SAMPLING_MASS] = apply_in_tiles(
                self._tile_rows, lambda *rows: (sampling_mass(how.flags, *rows),), *rows
            )[0]
        if not self._stats:
            return mass

        def compute_stats(logits: Tensor) -> tuple[Tensor, ...]:
            logprobs = logits.float().log_softmax(-1)
            return tuple(compute(logprobs) for compute in self._stats.values())

        values = apply_in_tiles(self._tile_rows, compute_stats, logits[:, : self.num_tokens])
        return mass | dict(zip(self._stats, values, strict=True))


def filter_logits(
    scaled: Tensor, flags: SamplingFlags, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Apply top-k, top-p and min-p, in this order: return logits with -inf for removed tokens.

    scaled: logits [rows, tokens] divided by the temperature.
    top_k, top_p, min_p: [rows, 1]; top_k 0 keeps all tokens.
    """
    if flags.likeliest:
        ranked = scaled.topk(min(flags.likeliest, scaled.shape[1]), dim=-1).values
        least = ranked.gather(1, (top_k - 1).clamp(0, ranked.shape[1] - 1))
        scaled = scaled.masked_fill((scaled < least) & (top_k > 0), float("-inf"))
    if flags.top_p:
        ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= top_p
        scaled = scaled.masked_fill(
            torch.zeros_like(outside).scatter(1, index, outside), float("-inf")
        )
    if flags.min_p:
        floor = scaled.softmax(-1).amax(-1, keepdim=True) * min_p
        scaled = scaled.masked_fill(scaled.softmax(-1) < floor, float("-inf"))
    return scaled


def samples_in_kernel(device: torch.device, attention: str) -> bool:
    """Return True if a `Sampler` next to this attention is `fused`: on CUDA with Triton.

    attention: name of the attention backend; `reference` excludes kernels.
    """
    if device.type != "cuda" or attention == "reference":
        return False
    return why_no_kernels(device, torch.float32) is None

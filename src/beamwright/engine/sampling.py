"""Counter-based sampling: Gumbel-max keyed by (seed, lineage, position, token id).

A token's noise is a hash of those four, so a node's tokens do not depend on the batch, and
removing tokens from the vocabulary never shifts the draws of the others
(docs/architecture.md, "Sameness").
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from beamwright.attention import why_no_kernels
from beamwright.engine.candidates import NOISE_BITS, RowWay, draw_candidate, hash_words
from beamwright.engine.row_sampling import RowSampling, Ways
from beamwright.models.decoder import in_tiles
from beamwright.protocols import ReadsTokenStats
from beamwright.tree.node import Lineage

_LIKELIEST = 20
_LARGE_VOCAB = 16384


def lineage_key(seed: int, lineage: Lineage, purpose: str = "") -> tuple[int, int]:
    """Two signed 32-bit keys of one node's random stream.

    purpose: a tag for streams beside the tree's own (rollouts, revisions).
    """
    text = "\x1f".join([str(seed), purpose, *(f"{type(x).__name__}:{x}" for x in lineage)])
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return (
        int.from_bytes(digest[:4], "little", signed=True),
        int.from_bytes(digest[4:], "little", signed=True),
    )


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32 (the tensor type has only the arithmetic one)."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3; int32 multiplication wraps."""
    x = (x ^ _shift(x, 16)) * -2048144789
    x = (x ^ _shift(x, 13)) * -1028477387
    return x ^ _shift(x, 16)


def spread_tokens(token_ids: torch.Tensor) -> torch.Tensor:
    """Token ids [tokens] as well-mixed int32, once per vocabulary."""
    return _mix(token_ids.to(torch.int32) * -2048144777 + 374761393)


def gumbel_noise(keys: torch.Tensor, positions: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [rows, tokens] in float32.

    keys: [rows, 2] int32 from `lineage_key`; positions: [rows]; spread: `spread_tokens`.
    """
    first, second = _row_words(keys, positions)
    return _noise(first.unsqueeze(1), second.unsqueeze(1), spread)


def _row_words(keys: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What two rounds of a row's hash start with [rows], int32."""
    first = _mix(keys[:, 0] ^ (positions.to(torch.int32) * -1640531535))
    return first, _mix(keys[:, 1] + first)


def _noise(first: torch.Tensor, second: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    # Two multiply rounds with a key before each. Rows and tokens come in mixed already, and only
    # the high bits are used, so a third xor-shift would change nothing that can be seen. In place:
    # this is [rows, vocabulary], and runs once per token.
    x = spread ^ first
    x.bitwise_xor_(_shift(x, 16)).mul_(-2048144789).add_(second)
    x.bitwise_xor_(_shift(x, 13)).mul_(-1028477387)
    uniform = _shift(x, 32 - NOISE_BITS).float().add_(0.5).mul_(2.0**-NOISE_BITS)
    return uniform.log_().neg_().log_().neg_()


def entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """Entropy in nats [rows] of distributions [rows, tokens]; tokens of probability 0 add none."""
    terms: torch.Tensor = torch.special.entr(logprobs.exp())
    return terms.sum(-1)


def confidence(logprobs: torch.Tensor) -> torch.Tensor:
    """DeepConf's token confidence [rows] of distributions [rows, tokens].

    The negative mean log-probability of the likeliest tokens, 20 as in the published code: the
    surer the model is of one, the less likely are the others. At least the log of their number.
    """
    return -logprobs.topk(min(_LIKELIEST, logprobs.shape[-1]), dim=-1).values.mean(-1)


TOKEN_STATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "entropy": entropy,
    "confidence": confidence,
}
"""What can be kept of every token's distribution: from log-probabilities [rows, tokens] to [rows].
"""


def stats_read_by(*policies: object) -> frozenset[str]:
    """Names of the statistics that these verifiers and strategies read."""
    reading = (policy for policy in policies if isinstance(policy, ReadsTokenStats))
    return frozenset[str]().union(*(policy.token_stats for policy in reading))


class Sampler:
    """Draws one token per row.

    num_tokens: ids at or above it are never drawn (rows of the LM head without a token).
    token_stats: what `stats` computes, of `TOKEN_STATS`. tile_rows: see `models.decoder.Decoder`.
    captured: the host must read nothing on the way. fused: one kernel draws for rows without
    filters, whoever is beside them (`draw_kernel`; see `draws_in_kernel`).

    Rows of a large vocabulary are drawn one at a time on a CPU, so that one stays in the cache, and
    only from the tokens that can win. The bits are those of all rows at once.

    Raises:
        KeyError: if a statistic is not in the table.
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
        self._tile_rows = tile_rows
        self._fused = _fused_draw() if fused else None
        large = num_tokens >= _LARGE_VOCAB and device.type == "cpu"
        self._by_row = large and not captured and not fused
        self._num_tokens = num_tokens
        self._stats = {name: TOKEN_STATS[name] for name in sorted(token_stats)}
        self._spread = spread_tokens(torch.arange(num_tokens, device=device))

    def sample(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        how: RowSampling,
        unread: Collection[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [rows] and their log-probabilities [rows] under the untempered model.

        logits: [rows, vocab]; keys [rows, 2]; positions [rows] of the tokens being drawn.
        unread: rows whose token nobody reads; where rows are drawn one by one it is token 0.
        """
        if self._by_row:
            return self._sample_by_row(logits, keys, positions, how, unread)
        if self._fused is None:
            return self._sample_all(logits, keys, positions, how)
        own = logits[:, : self._num_tokens]
        chosen, logprobs = self._fused(own, keys, positions, how.greedy, how.temperature)
        if how.ways.filters:
            # A row's bits must not follow the filters of others.
            filtered = self._sample_all(logits, keys, positions, how)
            chosen = torch.where(how.filters, filtered[0], chosen)
            logprobs = torch.where(how.filters, filtered[1], logprobs)
        return chosen, logprobs

    def _sample_all(
        self, logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, how: RowSampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        work = partial(self._sample, how.ways)
        chosen, logprobs = in_tiles(self._tile_rows, work, logits, keys, positions, *how.tensors)
        return chosen, logprobs

    def _sample_by_row(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        how: RowSampling,
        unread: Collection[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.stack(_row_words(keys, positions), dim=1).tolist()
        chosen = torch.zeros(len(logits), dtype=torch.long)
        logprobs = torch.zeros(len(logits))
        ways = zip(*(each.flatten().tolist() for each in how.tensors), strict=True)
        for row, (is_greedy, *way) in enumerate(ways):
            if row in unread:
                continue
            token = None
            if not is_greedy:
                own = logits[row, : self._num_tokens].float()
                token = self._draw_candidate(own, words[row], RowWay(*way))
            if token is not None:
                chosen[row], logprobs[row] = token, own.log_softmax(-1)[token]
                continue
            one = slice(row, row + 1)
            tensors = (each[one] for each in (logits, keys, positions, *how.tensors))
            alone = how.ways._replace(is_greedy=is_greedy, draws=not is_greedy)
            chosen[one], logprobs[one] = self._sample(alone, *tensors)
        return chosen, logprobs

    def _draw_candidate(
        self, logits: torch.Tensor, words: tuple[int, int], way: RowWay
    ) -> int | None:
        def noise(tokens: torch.Tensor) -> torch.Tensor:
            first, second = torch.tensor(words, dtype=torch.int32)
            return _noise(first, second, self._spread[tokens])

        def hashed() -> npt.NDArray[np.uint32]:
            return hash_words(*words, self._spread.numpy().view(np.uint32))

        return draw_candidate(logits, way, noise, hashed)

    def _sample(
        self,
        ways: Ways,
        logits: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        greedy: torch.Tensor,
        temperature: torch.Tensor,
        *filters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits[:, : self._num_tokens].float()
        if not ways.draws:
            chosen = logits.argmax(-1)
        else:
            allowed = allow(logits / temperature, ways, *filters)
            chosen = gumbel_noise(keys, positions, self._spread).add_(allowed).argmax(-1)
            if ways.is_greedy:
                chosen = torch.where(greedy, logits.argmax(-1), chosen)
        logprobs = logits.log_softmax(-1).gather(1, chosen.unsqueeze(1)).squeeze(1)
        return chosen, logprobs

    def stats(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """What was asked for of the untempered, unfiltered distribution: by name, [rows].

        logits: [rows, vocab]. Apart from `sample`, so that nobody's tokens depend on it.
        """
        if not self._stats:
            return {}
        found = in_tiles(self._tile_rows, self._compute_stats, logits)
        return dict(zip(self._stats, found, strict=True))

    def _compute_stats(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprobs = logits[:, : self._num_tokens].float().log_softmax(-1)
        return tuple(compute(logprobs) for compute in self._stats.values())


def allow(
    scaled: torch.Tensor,
    ways: Ways,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Logits [rows, tokens], -inf where top-k, top-p or min-p leaves a token out, in that order.

    top_k: [rows, 1], as the others; 0 for all tokens.
    """
    if ways.likeliest:
        ranked = scaled.topk(min(ways.likeliest, scaled.shape[1]), dim=-1).values
        least = ranked.gather(1, (top_k - 1).clamp(0, ranked.shape[1] - 1))
        scaled = scaled.masked_fill((scaled < least) & (top_k > 0), float("-inf"))
    if ways.top_p:
        ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= top_p
        scaled = scaled.masked_fill(
            torch.zeros_like(outside).scatter(1, index, outside), float("-inf")
        )
    if ways.min_p:
        floor = scaled.softmax(-1).amax(-1, keepdim=True) * min_p
        scaled = scaled.masked_fill(scaled.softmax(-1) < floor, float("-inf"))
    return scaled


def draws_in_kernel(device: torch.device, attention: str) -> bool:
    """Whether a `Sampler` beside this attention is `fused`: on CUDA, if Triton is there.

    attention: a backend's name; `reference` is for those who want no kernels.
    """
    if device.type != "cuda" or attention == "reference":
        return False
    return why_no_kernels(device, torch.float32) is None


def _fused_draw() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from beamwright.engine.draw_kernel import draw  # noqa: PLC0415 (loads Triton)

    return draw


def stack_keys(keys: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """[rows, 2] int32 of several nodes' keys."""
    return torch.tensor(list(keys), dtype=torch.int32, device=device)

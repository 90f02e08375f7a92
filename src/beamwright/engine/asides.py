"""Asides: short texts that a model generates after a path, outside the tree (a judge's critiques).

An aside reads a path's KV. The KV of its own tokens is freed after its batch. Asides are greedy, or
sampled with random keys of their own, so the tokens of an aside depend on its path and key alone,
not on batch or budget.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from beamwright.engine.noise import stack_keys
from beamwright.engine.sampling import RowSampling, Sampler
from beamwright.errors import CapacityError, DeviceMemoryError, NotFiniteError
from beamwright.kv.segments import Path, PathPart, copies_needed, for_all_groups
from beamwright.models.decoder import padded_rows
from beamwright.models.load import is_out_of_memory
from beamwright.models.prefill import PrefillRequest
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import TreeModel
from beamwright.sections import SamplingSettings
from beamwright.tree import Node

GREEDY = SamplingSettings(temperature=0.0)


@dataclass(eq=False, kw_only=True)
class Aside:
    """A short text to generate after a path, and its tokens so far."""

    node: Node  # the node that the aside is about
    given: Sequence[int]  # token ids at the start of the text, which are prefilled
    limit: int  # maximum number of generated tokens
    ends: Callable[[Sequence[int]], bool]  # returns True if the last token ends the text
    path: Path = ()  # stored KV that the text follows
    start: int = 0  # number of tokens in `path`
    stream: tuple[int, int] = (0, 0)  # random key, from `noise.lineage_key`
    token_ids: list[int] = field(default_factory=list)  # generated so far
    ended: bool = False  # True once `ends` was true

    @property
    def stopped(self) -> bool:
        """True if no further token of this aside is generated."""
        return self.ended or len(self.token_ids) >= self.limit

    def restart(self) -> None:
        """Discard the generated tokens, and count them as wasted (`Node.usage`)."""
        self.node.usage["overrun"] += len(self.token_ids)
        self.token_ids, self.ended = [], False


class AsideWriter:
    """Generator of asides with one model. One thread at a time may call it.

    num_tokens: size of the vocabulary; rows of the LM head beyond it have no text.
    who: name of the caller in errors.
    """

    def __init__(
        self, model: TreeModel, num_tokens: int, who: str, sampling: SamplingSettings = GREEDY
    ) -> None:
        self._model, self._who, self._sampling = model, who, sampling
        decoder = model.decoder
        self._sampler = Sampler(num_tokens, decoder.device, (), decoder.tile_rows)

    def first_that_fit(self, asides: Sequence[Aside]) -> Sequence[Aside]:
        """Return the longest prefix of `asides` whose KV fits, even if all reach their limit."""
        store = self._model.store

        def too_many(count: int) -> bool:
            some = asides[:count]
            needs = copies_needed((aside.path for aside in some), per_beam=store.copies_per_beam)
            grown = {
                store.create_unmanaged(): n for each in some for n in (len(each.given), each.limit)
            }
            return not store.fits(store.total_copies(needs), grown)

        return asides[: bisect_left(range(1, len(asides) + 1), True, key=too_many)]

    def write(self, asides: Sequence[Aside]) -> None:
        """Generate all asides in one batch. Halve the batch when working memory runs out.

        Raises:
            CapacityError: if their KV does not fit; DeviceMemoryError: if not even one aside can be
                computed; NotFiniteError: if logits are NaN or infinite.
        """
        try:
            self._write(asides)
            return
        except Exception as error:
            for aside in asides:
                aside.restart()
            if not is_out_of_memory(error):
                raise
            if len(asides) == 1:
                raise DeviceMemoryError(f"{self._who} cannot write a single text") from None
        half = -(-len(asides) // 2)
        self.write(asides[:half])
        self.write(asides[half:])

    @torch.inference_mode()
    def _write(self, asides: Sequence[Aside]) -> None:
        store = self._model.store
        given, written = ([store.create() for _ in asides] for _ in range(2))
        needs = copies_needed((a.path for a in asides), per_beam=store.copies_per_beam)
        try:
            with store.acquire(needs) as lease:
                lease.add(for_all_groups(dict.fromkeys(given, 1)))
                pairs = list(zip(asides, given, strict=True))
                hidden = self._model.prefill(
                    [
                        PrefillRequest(
                            a.path, segment, a.given, a.start, read=(len(a.given) - 1,), stays=False
                        )
                        for a, segment in pairs
                    ]
                )
                try:  # reserve all blocks now; only a single aside may begin with fewer
                    store.reserve({s: a.limit for a, s in zip(asides, written, strict=True)})
                except CapacityError:
                    if len(asides) > 1:
                        raise
                lease.add(for_all_groups(dict.fromkeys(written, 1)))
                paths = [(*a.path, PathPart(segment, segment.length)) for a, segment in pairs]
                session = self._model.open_session(paths, written)
                try:
                    self._decode(asides, session, torch.cat(hidden))
                finally:
                    session.close()
        finally:
            for segment in (*given, *written):
                store.free(segment)

    def _decode(self, asides: Sequence[Aside], session: DecodeSession, hidden: Tensor) -> None:
        """Sample tokens until all asides have stopped. hidden: [asides, hidden]."""
        decoder = self._model.decoder
        spare = session.num_rows - len(asides)
        hidden = torch.cat([hidden, hidden[:1].expand(spare, -1)])
        present: list[Aside | None] = [*asides, *([None] * spare)]  # None: a padding row
        padded = [*asides, *([asides[0]] * spare)]
        starts = [aside.start + len(aside.given) for aside in padded]
        positions = torch.tensor(starts, device=decoder.device)
        keys = stack_keys([aside.stream for aside in padded], decoder.device)
        how = RowSampling.of([self._sampling] * len(padded), decoder.device)
        while True:
            tokens, logprobs = self._sampler.sample(decoder.logits(hidden), keys, positions, how)
            going = self._append(present, tokens.tolist(), logprobs.tolist(), session)
            if not going:
                return
            if padded_rows(len(going)) < session.num_rows:
                session.arrange_rows(going)
                spare = session.num_rows - len(going)
                present = [*(present[i] for i in going), *([None] * spare)]
                index = torch.tensor([*going, *[going[0]] * spare], device=decoder.device)
                tokens, positions, keys = tokens[index], positions[index], keys[index]
                how = how.select_rows(index)
            hidden = session.forward(tokens, positions)
            # Stopped rows are computed too; their positions must stay inside the context.
            positions.add_(1).clamp_(max=decoder.shape.context - 1)

    def _append(
        self,
        present: Sequence[Aside | None],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        session: DecodeSession,
    ) -> list[int]:
        """Append a token to each unfinished aside; return the places of the ones still unfinished.

        A place is an index of `present`. Finished asides are removed from the session.
        """
        going: list[int] = []
        done: list[int] = []
        drawn = enumerate(zip(present, tokens, logprobs, strict=True))
        for index, (aside, token, logprob) in drawn:
            if aside is None:
                continue
            if aside.stopped:
                aside.node.usage["overrun"] += 1
                continue
            if not math.isfinite(logprob):
                place = f"problem {aside.node.problem_id}, step {aside.node.depth}"
                raise NotFiniteError(f"{self._who}: NaN or infinite logits at {place}")
            aside.token_ids.append(token)
            aside.ended = aside.ends(aside.token_ids)
            (done if aside.stopped else going).append(index)
        if done:
            session.deactivate_rows(done)
        return going

"""Asides: short texts behind a path that nobody keeps: a judge's critiques.

What an aside reads and writes beside its path is in segments that live as long as its batch does.
Asides are greedy, or drawn from streams of their own, so what is written depends on path and stream
alone, and on neither batch nor budget. Knows one model; no verifier, no policy.
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
from beamwright.kv.segments import Path, PathPart, copies_needed, whole
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
    """A text that is written behind a path.

    node: whose it is. path: of KV that is there, of `start` tokens. given: token ids that it begins
    with, which are read. limit: most tokens that are written. ends: True if the last of these ends
    it. stream: key of its draws. token_ids: written so far. ended: it is over, whatever its limit.
    """

    node: Node
    given: Sequence[int]
    limit: int
    ends: Callable[[Sequence[int]], bool]
    path: Path = ()
    start: int = 0
    stream: tuple[int, int] = (0, 0)
    token_ids: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def stopped(self) -> bool:
        """True if no further token is written."""
        return self.ended or len(self.token_ids) >= self.limit

    def restart(self) -> None:
        """Forget what was written; it is lost."""
        self.node.usage["overrun"] += len(self.token_ids)
        self.token_ids, self.ended = [], False


class AsideWriter:
    """Writes asides with one model. One thread at a time may call it.

    num_tokens: of its vocabulary; rows of the LM head beyond have no text. who: writes them, for
    errors.
    """

    def __init__(
        self, model: TreeModel, num_tokens: int, who: str, sampling: SamplingSettings = GREEDY
    ) -> None:
        self._model, self._who, self._sampling = model, who, sampling
        decoder = model.decoder
        self._sampler = Sampler(num_tokens, decoder.device, (), decoder.tile_rows)

    def that_fit(self, asides: Sequence[Aside]) -> Sequence[Aside]:
        """The first of these that have room together, at full length, beside what is held."""
        store = self._model.store

        def too_many(count: int) -> bool:
            some = asides[:count]
            needs = copies_needed((aside.path for aside in some), per_beam=store.copies_per_beam)
            grown = {store.blank(): n for each in some for n in (len(each.given), each.limit)}
            return not store.fits(store.beside_others(needs), grown)

        return asides[: bisect_left(range(1, len(asides) + 1), True, key=too_many)]

    def write(self, asides: Sequence[Aside]) -> None:
        """Write them together, half of them at a time where working memory runs out.

        Raises:
            CapacityError: if their KV does not fit; DeviceMemoryError: if there is no working
                memory even for one; NotFiniteError: if logits are NaN or infinite.
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
                raise DeviceMemoryError(f"{self._who}: one text cannot be written") from None
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
                lease.add(whole(dict.fromkeys(given, 1)))
                pairs = list(zip(asides, given, strict=True))
                hidden = self._model.prefill(
                    [
                        PrefillRequest(
                            a.path, segment, a.given, a.start, read=(len(a.given) - 1,), stays=False
                        )
                        for a, segment in pairs
                    ]
                )
                try:  # so that none runs out of blocks; a single one may be short
                    store.reserve({s: a.limit for a, s in zip(asides, written, strict=True)})
                except CapacityError:
                    if len(asides) > 1:
                        raise
                lease.add(whole(dict.fromkeys(written, 1)))
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
        """Token by token until all have stopped. hidden: [asides, hidden]."""
        decoder = self._model.decoder
        spare = session.num_rows - len(asides)
        hidden = torch.cat([hidden, hidden[:1].expand(spare, -1)])
        present: list[Aside | None] = [*asides, *([None] * spare)]  # None pads the batch
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
                session.arrange(going)
                spare = session.num_rows - len(going)
                present = [*(present[i] for i in going), *([None] * spare)]
                index = torch.tensor([*going, *[going[0]] * spare], device=decoder.device)
                tokens, positions, keys = tokens[index], positions[index], keys[index]
                how = how.picked(index)
            hidden = session.forward(tokens, positions)
            # Rows that have stopped stay inside the context; what they decode is dropped.
            positions.add_(1).clamp_(max=decoder.shape.context - 1)

    def _append(
        self,
        present: Sequence[Aside | None],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        session: DecodeSession,
    ) -> list[int]:
        """Add a token to every row that goes on; returns those that still do."""
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
            session.drop(done)
        return going

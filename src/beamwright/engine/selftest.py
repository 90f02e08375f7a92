"""Start-up self-test of sameness, layer 1: do a row's bits depend on the batch it is in?

Probed on the machine at hand, because another CPU or another matrix library may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from beamwright.attention import KERNEL_BACKENDS
from beamwright.attention.protocols import AttentionBackend, AttentionView
from beamwright.engine.sampling import RowSampling, Sampler, draws_in_kernel
from beamwright.errors import InputError
from beamwright.kv.segments import Path, PathPart
from beamwright.models.decoder import FEW_ROWS, ROW_MULTIPLE, Decoder
from beamwright.models.prefill import PrefillRequest
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import TreeModel
from beamwright.models.weights import give_back
from beamwright.sections import SamplingSettings

_STEPS, _PROMPT = 2, 14
_DECODED = (0, 14, 31, 62)  # tokens that rows have decoded before: their tails get longer
LEAST_CONTEXT = _PROMPT + 4 + _STEPS  # a prompt, a step of up to four tokens, and those behind it
_KV_TOKENS = 8192
_BATCH_SIZES = (8, 24, 64, 160)  # some libraries change kernels at a hundred rows and more
_FEW_SIZES = (*[1] * 8, *[2] * 8, *[4] * 4, 64, 160)  # of them those that batches may have
_FIXED_SIZES = (1, 2, 8, 16)
# Where batches are parted. Whole ones are larger than the 8 rows that all but 1 to 4 are padded to;
# on a card libraries choose kernels by size, up to that of a tile and beyond.
_ON_CPU, _ON_CARD, _INTERPRETED = (0, 1, 4, 9, 45), (0, 1, 9, 30, 70), (0, 3, 9)
_FIXED = (0, 1, 5)  # where no library chooses


def kind(decoder: Decoder, backend: AttentionBackend) -> tuple[object, ...]:
    """What models have in common for which one self-test answers: they run the same code."""
    return *decoder.kind, type(backend), backend.name


def settle_rows(decoders: Sequence[Decoder], backend: AttentionBackend) -> bool:
    """True if batches of these decoders, which are of one `kind`, are exact.

    One to four rows are then padded to 2 or 4 if they are exact with that, too: a product of 8 rows
    takes 1.4 times as long as one of 2; and a single row not even to 2 where all products say so.
    On a CPU: elsewhere libraries choose kernels by the rows. Not with recurrent layers, whose gates
    are numbers per row: fewer than a vector of them are rounded otherwise, in the odd token alone.
    """
    first, choices = decoders[0], [ROW_MULTIPLE]
    few = first.device.type == "cpu" and first.tile_rows is None and not first.shape.states
    if few and backend.name not in KERNEL_BACKENDS:
        choices.insert(0, FEW_ROWS)
        if all(decoder.takes_one_row for decoder in decoders):
            choices.insert(0, 1)
    for least in choices:
        for decoder in decoders:
            decoder.least_rows = least
        if batches_are_exact(first, backend):
            return True
    return False


@torch.inference_mode()
def batches_are_exact(decoder: Decoder, backend: AttentionBackend) -> bool:
    """True if rows computed in one batch equal, bit for bit, the same rows in smaller batches.

    Runs the decoder's first layer of each kind in batches of up to 256 rows, and with attention and
    LM head as a search does, in batches of some dozen rows that have decoded differently many
    tokens; fewer where an interpreter runs kernels, or sums have one order by construction. On the
    device and with the attention that it has. False where the device has no memory left to try.

    Raises:
        InputError: if the context is shorter than the few tokens that this takes.
    """
    if decoder.shape.context < LEAST_CONTEXT:
        raise InputError(
            f"a context of {decoder.shape.context} tokens is too short to search in: "
            f"--context must be at least {LEAST_CONTEXT}"
        )
    first = decoder.first_layers()
    first.least_rows = decoder.least_rows
    sizes: Sequence[int] = _BATCH_SIZES
    if decoder.is_fixed:
        sizes = _FIXED_SIZES
    elif first.least_rows < ROW_MULTIPLE:
        sizes = [size for size in _FEW_SIZES if size >= first.least_rows]
    bounds: Sequence[int] = _ON_CARD
    if decoder.device.type == "cpu":
        # A recurrent layer reads prompts row by row, and what it does has no size of attention's.
        few = backend.name in KERNEL_BACKENDS or decoder.shape.states
        bounds = _FIXED if decoder.is_fixed else _INTERPRETED if few else _ON_CPU
    try:
        alone = [_on_their_own(first, batches) for batches in ([sum(sizes)], sizes)]
        rows = _Rows(first, backend, bounds[-1])
        parts = [rows.decode(range(*batch)) for batch in pairwise(bounds)]
        return torch.equal(*alone) and torch.equal(torch.cat(parts), rows.decode(range(bounds[-1])))
    except torch.OutOfMemoryError:
        return False


def _on_their_own(decoder: Decoder, batches: Sequence[int]) -> Tensor:
    """Hidden states of rows [rows, hidden] that see nothing but themselves, in batches."""
    generator, num_rows = torch.Generator().manual_seed(0), sum(batches)
    tokens = torch.randint(decoder.shape.vocab, (num_rows,), generator=generator)
    places = torch.arange(num_rows) % decoder.shape.context
    parts = [values.to(decoder.device).split(list(batches)) for values in (tokens, places)]
    inputs = zip(*parts, strict=True)
    return torch.cat([decoder.hidden(ids, at, _OwnTokenOnly()) for ids, at in inputs])


class _OwnTokenOnly(AttentionView):
    """A view in which a token sees nothing but itself, sinks neither."""

    def attend(self, layer: int, query: Tensor, key_value: Tensor, sinks: Any = None) -> Tensor:
        value = key_value[:, 1]
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


class _Rows:
    """Rows that decode the same few tokens whoever is beside them, behind paths of their own."""

    def __init__(self, decoder: Decoder, backend: AttentionBackend, num_rows: int) -> None:
        self._decoder, self._backend, device = decoder, backend, decoder.device
        generator, vocab = torch.Generator().manual_seed(0), decoder.shape.vocab

        def draw(count: int) -> Any:
            return torch.randint(vocab, (count,), generator=generator).tolist()

        most = decoder.shape.context - LEAST_CONTEXT
        self._prompt = draw(_PROMPT)
        self._steps = [draw(1 + row % 4) for row in range(num_rows)]
        self._decoded = [draw(min(most, _DECODED[row % len(_DECODED)])) for row in range(num_rows)]
        lengths = zip(self._steps, self._decoded, strict=True)
        self._starts = torch.tensor([_PROMPT + len(a) + len(b) for a, b in lengths], device=device)
        self._tokens = torch.tensor([draw(_STEPS) for _ in range(num_rows)], device=device)
        keys = torch.randint(2**31 - 1, (num_rows, 2), generator=generator)
        self._keys = keys.to(device, torch.int32)
        fused = draws_in_kernel(device, backend.name)
        self._sampler = Sampler(vocab, device, tile_rows=decoder.tile_rows, fused=fused)

    def decode(self, rows: range) -> Tensor:
        """Noisy logits [rows, steps] of these rows, decoded together."""
        give_back()  # of the batch before
        shape, size = self._decoder.shape, self._decoder.dtype.itemsize
        budget = _KV_TOKENS * shape.kv_bytes_per_token(size)
        if shape.states:  # of the prompt, and of two segments a row
            budget += (2 * len(rows) + 1) * (shape.state_bytes(size) + budget // _KV_TOKENS * 16)
        model = TreeModel(self._decoder, self._backend, budget)
        prompt, parents, segments = model.store.create(), list[Any](), list[Any]()
        model.prefill([PrefillRequest((), prompt, self._prompt, 0)])
        path, steps = (PathPart(prompt, _PROMPT),), list[PrefillRequest]()
        for row in rows:
            parents.append(model.store.create())
            segments.append(model.store.create())
            steps.append(PrefillRequest(path, parents[-1], self._steps[row], _PROMPT))
        model.prefill(steps)
        paths: list[Path] = [(*path, PathPart(parent, parent.length)) for parent in parents]
        decoded = [
            PrefillRequest(*behind, self._decoded[row], _PROMPT + behind[0][-1].visible)
            for behind, row in zip(zip(paths, segments, strict=True), rows, strict=True)
            if self._decoded[row]
        ]
        model.prefill(decoded)
        session = model.open_session(paths, segments)
        drawn = [self._draw(session, rows, step) for step in range(_STEPS)]
        session.close()
        model.store.recompute_segments = None  # no circle: its pool goes at once
        return torch.stack(drawn, dim=1)

    def _draw(self, session: DecodeSession, rows: range, step: int) -> Tensor:
        """What the next token of each row leads to [rows]."""
        padding = [rows[0]] * (session.num_rows - len(rows))
        index = torch.tensor([*rows, *padding], device=self._decoder.device)
        positions = self._starts[index] + step
        states = session.forward(self._tokens[index, step], positions)
        if not self._decoder.shape.has_lm_head:  # whole numbers add up alike in any order
            return states.float().view(torch.int32).sum(-1).float()[: len(rows)]
        logits = self._decoder.logits(states)
        how = RowSampling.of([SamplingSettings()] * session.num_rows, logits.device)
        _, logprobs = self._sampler.sample(logits, self._keys[index], positions, how)
        return (logprobs.float() + logits[:, 0].float())[: len(rows)]

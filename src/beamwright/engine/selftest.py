"""Start-up test of batch invariance: are a row's results independent of the rest of its batch?

It runs on the machine at hand, because another CPU or another matrix library may behave differently
(docs/concepts/sameness.md, layer 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from beamwright.attention import KERNEL_BACKENDS
from beamwright.attention.protocols import AttentionBackend, AttentionView
from beamwright.engine.sampling import RowSampling, Sampler, samples_in_kernel
from beamwright.errors import InputError
from beamwright.kv.segments import Path, PathPart
from beamwright.models.decoder import FEW_ROWS, ROW_MULTIPLE, Decoder
from beamwright.models.prefill import PrefillRequest
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import TreeModel
from beamwright.models.weights import trim_heap
from beamwright.sections import SamplingSettings

_STEPS, _PROMPT = 2, 14  # tokens decoded per row, and tokens of the prompt
_DECODED = (0, 14, 31, 62)  # tokens that rows have decoded before, for tails of several lengths
LEAST_CONTEXT = _PROMPT + 4 + _STEPS  # a prompt, a step of up to four tokens, the test's tokens
_KV_TOKENS = 8192  # size of the test's KV memory
_BATCH_SIZES = (8, 24, 64, 160)  # some libraries switch kernels at a hundred rows and more
_FEW_SIZES = (*[1] * 8, *[2] * 8, *[4] * 4, 64, 160)  # sizes below `least_rows` are left out
_FIXED_SIZES = (1, 2, 8, 16)  # for matrix products that sum in a fixed order by construction
# Bounds at which rows are split into smaller batches. The whole batch is larger than 8 rows, to
# which batches above 4 rows are padded. On a GPU, libraries choose kernels by size, up to the size
# of a tile and beyond.
_ON_CPU, _ON_CARD, _INTERPRETED = (0, 1, 4, 9, 45), (0, 1, 9, 30, 70), (0, 3, 9)
_FIXED = (0, 1, 5)  # if matrix products sum in a fixed order


def kernel_key(decoder: Decoder, backend: AttentionBackend) -> tuple[object, ...]:
    """Return a key that is equal for models that run the same kernels; one test covers them."""
    return *decoder.self_test_key, type(backend), backend.name


def set_least_rows(decoders: Sequence[Decoder], backend: AttentionBackend) -> bool:
    """Find the smallest batch size that is still batch-invariant, and set `least_rows` to it.

    Return False if no size is. All decoders must have one `kernel_key`. On a CPU, one to four rows
    are padded to 2 or 4 rows instead of 8 if that is exact, because a product of 8 rows takes 1.4
    times as long as one of 2. A single row is not padded at all if all products allow it. On other
    devices only 8 is tried, because libraries choose kernels by the number of rows. With recurrent
    layers, too, only 8 is tried: their gates are one number per row, and a CPU rounds fewer numbers
    than a vector register holds differently, in rare tokens only.
    """
    first, choices = decoders[0], [ROW_MULTIPLE]
    few = first.device.type == "cpu" and first.tile_rows is None and not first.shape.states
    if few and backend.name not in KERNEL_BACKENDS:
        choices.insert(0, FEW_ROWS)
        if all(decoder.is_exact_for_one_row for decoder in decoders):
            choices.insert(0, 1)
    for least in choices:
        for decoder in decoders:
            decoder.least_rows = least
        if batches_are_exact(first, backend):
            return True
    return False


@torch.inference_mode()
def batches_are_exact(decoder: Decoder, backend: AttentionBackend) -> bool:
    """Return True if rows in one batch are bitwise equal to the same rows in smaller batches.

    The test runs the decoder's first layer of each kind in batches of up to 256 rows. It also runs
    attention and the LM head as a search does, in batches of some dozen rows with different numbers
    of decoded tokens. Batches are smaller if an interpreter runs the kernels, or if sums have one
    order by construction. The decoder's own device and attention are tested. The result is False if
    the device has no memory left for the test.

    Raises:
        InputError: if the context is shorter than the few tokens that the test needs.
    """
    if decoder.shape.context < LEAST_CONTEXT:
        raise InputError(
            f"a context of {decoder.shape.context} tokens is too short for a search; "
            f"--context must be at least {LEAST_CONTEXT}"
        )
    first = decoder.first_layers()
    first.least_rows = decoder.least_rows
    sizes: Sequence[int] = _BATCH_SIZES
    if decoder.is_batch_invariant:
        sizes = _FIXED_SIZES
    elif first.least_rows < ROW_MULTIPLE:
        sizes = [size for size in _FEW_SIZES if size >= first.least_rows]
    bounds: Sequence[int] = _ON_CARD
    if decoder.device.type == "cpu":
        # Few rows are tested where many would be slow: with kernels, which an interpreter runs
        # here, and with recurrent layers, which prefill row by row.
        few = backend.name in KERNEL_BACKENDS or decoder.shape.states
        bounds = _FIXED if decoder.is_batch_invariant else _INTERPRETED if few else _ON_CPU
    try:
        alone = [_compute_alone(first, batches) for batches in ([sum(sizes)], sizes)]
        rows = _Rows(first, backend, bounds[-1])
        parts = [rows.decode(range(*batch)) for batch in pairwise(bounds)]
        return torch.equal(*alone) and torch.equal(torch.cat(parts), rows.decode(range(bounds[-1])))
    except torch.OutOfMemoryError:
        return False


def _compute_alone(decoder: Decoder, batches: Sequence[int]) -> Tensor:
    """Return hidden states [rows, hidden] of random tokens that attend only to themselves.

    batches: the sizes of the batches in which the rows are computed.
    """
    generator, num_rows = torch.Generator().manual_seed(0), sum(batches)
    tokens = torch.randint(decoder.shape.vocab, (num_rows,), generator=generator)
    places = torch.arange(num_rows) % decoder.shape.context
    parts = [values.to(decoder.device).split(list(batches)) for values in (tokens, places)]
    inputs = zip(*parts, strict=True)
    return torch.cat([decoder.hidden(ids, at, _OwnTokenOnly()) for ids, at in inputs])


class _OwnTokenOnly(AttentionView):
    """A view in which a token attends to itself only, without sinks."""

    def attend(self, layer: int, query: Tensor, key_value: Tensor, sinks: Any = None) -> Tensor:
        value = key_value[:, 1]
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


class _Rows:
    """Test rows with different paths, which decode the same few tokens in any batch."""

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
        fused = samples_in_kernel(device, backend.name)
        self._sampler = Sampler(vocab, device, tile_rows=decoder.tile_rows, fused=fused)

    def decode(self, rows: range) -> Tensor:
        """Decode these rows in one batch; return a number per row and token, from its logits."""
        trim_heap()  # memory of the previous batch
        shape, size = self._decoder.shape, self._decoder.dtype.itemsize
        budget = _KV_TOKENS * shape.kv_bytes_per_token(size)
        if shape.states:  # recurrent states of the prompt, and of two segments per row
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
        model.store.recompute_segments = None  # breaks a reference cycle, so the pool is freed now
        return torch.stack(drawn, dim=1)

    def _draw(self, session: DecodeSession, rows: range, step: int) -> Tensor:
        """Decode one token per row; return a number per row that depends on its logits."""
        padding = [rows[0]] * (session.num_rows - len(rows))
        index = torch.tensor([*rows, *padding], device=self._decoder.device)
        positions = self._starts[index] + step
        states = session.forward(self._tokens[index, step], positions)
        if not self._decoder.shape.has_lm_head:  # sums of integers do not depend on their order
            return states.float().view(torch.int32).sum(-1).float()[: len(rows)]
        logits = self._decoder.logits(states)
        how = RowSampling.of([SamplingSettings()] * session.num_rows, logits.device)
        _, logprobs = self._sampler.sample(logits, self._keys[index], positions, how)
        return (logprobs.float() + logits[:, 0].float())[: len(rows)]

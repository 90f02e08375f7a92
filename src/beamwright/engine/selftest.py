"""Start-up self-test of sameness, layer 1: do a row's bits depend on the batch it is in?

Probed on the machine at hand, because another CPU or another matrix library may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import Any

import torch

from beamwright.attention import KERNEL_BACKENDS
from beamwright.engine.sampling import RowSampling, Sampler, draws_in_kernel
from beamwright.errors import InputError
from beamwright.kv.segments import Path, PathPart, Segment
from beamwright.models.decoder import Decoder, Linear
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import PrefillRequest, TreeModel
from beamwright.protocols import AttentionBackend
from beamwright.sections import SamplingSettings

_ROWS, _GPU_ROWS, _INTERPRETED_ROWS = 45, 70, 9
_STEPS, _PROMPT = 3, 13
_DECODED = (0, 14, 31, 62)  # tokens that rows have decoded before: their tails get longer
LEAST_CONTEXT = _PROMPT + 4 + _STEPS  # a prompt, a step of up to four tokens, and those behind it
_KV_TOKENS = 8192
_THREADED_ROWS = (8, 64)
_BATCH_SIZES = (8, 24, 64, 160)  # some libraries change kernels at a hundred rows and more


def unlike(
    decoders: Sequence[Decoder], backends: Sequence[AttentionBackend]
) -> list[tuple[Decoder, AttentionBackend]]:
    """The first of each kind of models, all of which one self-test answers for.

    Libraries choose a product's kernel by its sizes, dtype and device, never by what is multiplied:
    models that agree in these, in the kinds of their products and in attention run the same code.
    """
    kinds: dict[object, tuple[Decoder, AttentionBackend]] = {}
    for decoder, backend in zip(decoders, backends, strict=True):
        kinds.setdefault((*_kind(decoder), type(backend), backend.name), (decoder, backend))
    return list(kinds.values())


def _kind(decoder: Decoder) -> tuple[object, ...]:
    weights = decoder.weights
    parts = [*vars(weights.layers[0]).items(), *vars(weights).items()]
    products = [(name, type(p), type(p.weight)) for name, p in parts if isinstance(p, Linear)]
    fixed = (decoder.dtype, decoder.device, decoder.tile_rows)
    return (replace(decoder.shape, layers=1), *fixed, tuple(products))


@torch.inference_mode()
def batches_are_exact(decoder: Decoder, backend: AttentionBackend) -> bool:
    """True if rows computed in one batch equal, bit for bit, the same rows in smaller batches.

    Runs the decoder's first layer in batches of up to 256 rows, and the layer, attention and LM
    head as a search does, in batches of some dozen rows; fewer where an interpreter runs kernels.
    Rows have decoded differently many tokens, and once they join and leave a running batch.
    On the device and with the attention that it has. False where the device has no memory left to
    try.

    Raises:
        InputError: if the context is shorter than the few tokens that this takes.
    """
    if decoder.shape.context < LEAST_CONTEXT:
        raise InputError(
            f"a context of {decoder.shape.context} tokens is too short to search in: "
            f"--context must be at least {LEAST_CONTEXT}"
        )
    first, num_states = _first_layer(decoder), sum(_BATCH_SIZES)
    *apart, joining = _splits(decoder.device, backend)
    try:
        # Everything but attention and the LM head, in batches of every size.
        states = [_on_their_own(first, num_states, s) for s in ([num_states], _BATCH_SIZES)]
        rows = _Rows(first, backend, joining[-1].stop)
        whole = rows.decode([range(rows.num_rows)])
        batches = [batch for split in apart for batch in split]
        return (
            torch.equal(*states)
            and torch.equal(whole, rows.decode(joining))
            and all(torch.equal(rows.decode([b]), whole[b.start : b.stop]) for b in batches)
        )
    except torch.OutOfMemoryError:
        return False


def _first_layer(decoder: Decoder) -> Decoder:
    """The model cut off behind its first layer, LM head included."""
    shape = replace(decoder.shape, layers=1)
    weights = replace(decoder.weights, layers=decoder.weights.layers[:1])
    return Decoder(shape, weights, decoder.tile_rows)


def _on_their_own(decoder: Decoder, num_rows: int, batches: Sequence[int]) -> torch.Tensor:
    """Hidden states of rows [rows, hidden] that see nothing but themselves, in batches."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(decoder.shape.vocab, (num_rows,), generator=generator)
    tokens = drawn.to(decoder.device).split(list(batches))
    places = (torch.arange(num_rows) % decoder.shape.context).to(decoder.device)
    inputs = zip(tokens, places.split(list(batches)), strict=True)
    return torch.cat([decoder.hidden(*batch, _OwnTokenOnly()) for batch in inputs])


@torch.inference_mode()
def threads_agree(decoder: Decoder, backend: AttentionBackend, most: int) -> bool:
    """True if one thread of a CPU and `most` compute the same bits, as far as the LM head."""
    before, first = torch.get_num_threads(), _first_layer(decoder)
    results = []
    try:
        for count in (1, most):
            torch.set_num_threads(count)
            hidden = _on_their_own(first, sum(_THREADED_ROWS), _THREADED_ROWS)
            rows = _Rows(first, backend, _THREADED_ROWS[0])
            results.append((hidden, rows.decode([range(rows.num_rows)])))
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.set_num_threads(before)
    return all(map(torch.equal, *results))


class _OwnTokenOnly:
    """An `AttentionView` in which a token sees nothing but itself."""

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        value = key_value[:, 1]
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def close(self) -> None:
        """Nothing is held."""


def _splits(device: torch.device, backend: AttentionBackend) -> list[list[range]]:
    """Ways to part a batch; the last one's parts join one another.

    Batches are padded to 8 rows, so the whole is larger than that.
    """
    if device.type != "cpu":  # libraries choose kernels by size, up to that of a tile and beyond
        return [
            [range(1), range(1, 9), range(9, 30), range(30, _GPU_ROWS)],
            [range(35), range(35, _GPU_ROWS)],
        ]
    if backend.name in KERNEL_BACKENDS:
        return [[range(3), range(3, _INTERPRETED_ROWS)]]
    return [
        [range(1), range(1, 9), range(9, _ROWS)],
        [range(3), range(3, 11), range(11, 29), range(29, _ROWS)],
    ]


class _Rows:
    """Rows that decode the same few tokens whoever is beside them, behind paths of their own."""

    def __init__(self, decoder: Decoder, backend: AttentionBackend, num_rows: int) -> None:
        self._decoder, self._backend, self.num_rows = decoder, backend, num_rows
        generator, vocab = torch.Generator().manual_seed(0), decoder.shape.vocab

        def draw(count: int) -> Any:
            return torch.randint(vocab, (count,), generator=generator).tolist()

        most = decoder.shape.context - LEAST_CONTEXT
        self._prompt = draw(_PROMPT)
        self._steps = [draw(1 + row % 4) for row in range(num_rows)]
        self._decoded = [draw(min(most, _DECODED[row % len(_DECODED)])) for row in range(num_rows)]
        starts = map(len, map(add, self._steps, self._decoded))
        self._starts = _PROMPT + torch.tensor([*starts], device=decoder.device)
        self._tokens = torch.tensor([draw(_STEPS) for _ in range(num_rows)], device=decoder.device)
        keys = torch.randint(2**31 - 1, (num_rows, 2), generator=generator)
        self._keys = keys.to(decoder.device, torch.int32)
        fused = draws_in_kernel(decoder.device, backend.name)
        self._sampler = Sampler(vocab, decoder.device, tile_rows=decoder.tile_rows, fused=fused)

    def decode(self, batches: Sequence[range]) -> torch.Tensor:
        """Noisy logits [rows, steps] of these rows in their order, in one running batch.

        Each of the batches joins a token after the one before it, and leaves when it is through.
        """
        token_bytes = self._decoder.shape.kv_bytes_per_token(self._decoder.dtype.itemsize)
        model = TreeModel(self._decoder, self._backend, _KV_TOKENS * token_bytes)
        root = model.store.create()
        model.prefill([PrefillRequest((), root, self._prompt, 0)])
        prompt = (PathPart(root, _PROMPT),)
        drawn = torch.zeros(self.num_rows, _STEPS, device=self._decoder.device)
        session, present = DecodeSession(model.decoder, model.store, model.backend), list[int]()
        num_drawn = dict.fromkeys(range(self.num_rows), 0)
        waiting = list(batches)
        while True:
            staying = [place for place, row in enumerate(present) if num_drawn[row] < _STEPS]
            joining = list(waiting.pop(0)) if waiting else []
            if not staying and not joining:
                break
            if joining or len(staying) < len(present):
                session.arrange(staying, *self._begin(model, prompt, joining))
                present = [*(present[place] for place in staying), *joining]
            steps = [num_drawn[row] for row in present]
            drawn[present, steps] = self._draw(session, present, steps)
            num_drawn.update({row: num_drawn[row] + 1 for row in present})
        session.close()
        return drawn[[row for batch in batches for row in batch]]

    def _begin(
        self, model: TreeModel, prompt: Path, rows: Sequence[int]
    ) -> tuple[list[Path], list[Segment]]:
        """Paths of these rows, and segments with the tokens that they have decoded before."""
        parents = [model.store.create() for _ in rows]
        steps = [self._steps[row] for row in rows]
        model.prefill(
            [PrefillRequest(prompt, p, s, _PROMPT) for p, s in zip(parents, steps, strict=True)]
        )
        paths: list[Path] = [(*prompt, PathPart(p, p.length)) for p in parents]
        segments = [model.store.create() for _ in rows]
        decoded = [
            PrefillRequest(path, segment, self._decoded[row], _PROMPT + len(self._steps[row]))
            for path, segment, row in zip(paths, segments, rows, strict=True)
            if self._decoded[row]
        ]
        model.prefill(decoded)
        return paths, segments

    def _draw(self, session: DecodeSession, rows: list[int], steps: list[int]) -> torch.Tensor:
        """What the next token of each row leads to [rows]."""
        spare = session.num_rows - len(rows)
        index, at = (
            torch.tensor([*values, *values[:1] * spare], device=self._decoder.device)
            for values in (rows, steps)
        )
        positions = self._starts[index] + at
        states = session.forward(self._tokens[index, at], positions)
        if not self._decoder.shape.has_lm_head:  # whole numbers add up alike in any order
            return states.float().view(torch.int32).sum(-1).float()[: len(rows)]
        logits = self._decoder.logits(states)
        how = RowSampling.of([SamplingSettings()] * session.num_rows, logits.device)
        _, logprobs = self._sampler.sample(logits, self._keys[index], positions, how)
        return (logprobs.float() + logits[:, 0].float())[: len(rows)]

"""Start-up self-test of sameness, layer 1: do a row's bits depend on the batch it stands in?

Probed on the machine at hand, because another CPU or another matrix library may differ.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from beamwright.attention import BACKENDS, KERNEL_BACKENDS, make_attention, why_no_kernels
from beamwright.config import SamplingSettings
from beamwright.errors import InputError
from beamwright.kv import PathPart
from beamwright.models import PrefillRequest, TreeModel
from beamwright.models.decoder import TILE_ROWS, Decoder
from beamwright.models.named_shapes import shape_from_text
from beamwright.models.packed import pack_weights
from beamwright.models.shape import ModelShape
from beamwright.models.weights import random_weights
from beamwright.protocols import AttentionBackend
from beamwright.runtime.sampling import Sampler

_ROWS, _GPU_ROWS, _INTERPRETED_ROWS = 45, 70, 9
_STEPS, _PROMPT = 3, 13
LEAST_CONTEXT = _PROMPT + 4 + _STEPS  # a prompt, a step of up to four tokens, and those behind it
_KV_TOKENS = 8192
_BATCH_SIZES = (8, 24, 64, 160)  # some libraries change kernels at a hundred rows and more


@torch.inference_mode()
def batches_are_exact(decoder: Decoder, backend: AttentionBackend) -> bool:
    """True if rows computed in one batch equal, bit for bit, the same rows in smaller batches.

    Runs the decoder's first layer in batches of up to 256 rows, and the layer, attention and LM
    head as a search does, in batches of some dozen rows; fewer where an interpreter runs kernels.
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
    shape = replace(decoder.shape, layers=1)
    weights = replace(decoder.weights, layers=decoder.weights.layers[:1])
    first = Decoder(shape, weights, decoder.tile_rows)
    splits = _splits(decoder.device, backend)
    try:
        if not _layers_are_exact(first):
            return False
        whole = _logits(first, backend, [range(splits[0][-1].stop)])
        return all(torch.equal(whole, _logits(first, backend, split)) for split in splits)
    except torch.OutOfMemoryError:
        return False


def _layers_are_exact(decoder: Decoder) -> bool:
    """Everything but attention and the LM head, in batches of every size."""
    rows = sum(_BATCH_SIZES)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(decoder.shape.vocab, (rows,), generator=generator).to(decoder.device)
    positions = (torch.arange(rows) % decoder.shape.context).to(decoder.device)
    whole = decoder.hidden(tokens, positions, _OwnTokenOnly())
    parts = [
        decoder.hidden(*batch, _OwnTokenOnly())
        for batch in zip(tokens.split(_BATCH_SIZES), positions.split(_BATCH_SIZES), strict=True)
    ]
    return torch.equal(whole, torch.cat(parts))


class _OwnTokenOnly:
    """A view in which a token sees nothing but itself."""

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `protocols.AttentionView`."""
        value = key_value[:, 1]
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def close(self) -> None:
        """See `protocols.AttentionView`. Nothing is held."""


def _splits(device: torch.device, backend: AttentionBackend) -> list[list[range]]:
    """Ways to part a batch. Batches are padded to 8 rows, so the whole is larger than that."""
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


def _logits(decoder: Decoder, backend: AttentionBackend, split: list[range]) -> torch.Tensor:
    """Noisy logits [rows, steps, vocab] of a fixed set of rows, decoded in these batches."""
    device, rows = decoder.device, sum(map(len, split))
    generator = torch.Generator().manual_seed(0)
    vocab = decoder.shape.vocab
    prompt = torch.randint(vocab, (_PROMPT,), generator=generator).tolist()
    lengths = (1 + torch.arange(rows) % 4).tolist()
    steps = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
    tokens = torch.randint(vocab, (rows, _STEPS), generator=generator).to(device)
    keys = torch.randint(2**31 - 1, (rows, 2), generator=generator).to(device, torch.int32)
    token_bytes = decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
    model = TreeModel(decoder, backend, _KV_TOKENS * token_bytes)
    root = model.store.create()
    model.prefill([PrefillRequest((), root, prompt, 0)])
    path = (PathPart(root, _PROMPT),)
    found = torch.zeros(rows, _STEPS, device=device)
    sampler = Sampler(SamplingSettings(), vocab, device, tile_rows=decoder.tile_rows)
    for batch in split:
        mine = list(batch)
        parents = [model.store.create() for _ in mine]
        model.prefill(
            [PrefillRequest(path, p, steps[i], _PROMPT) for i, p in zip(mine, parents, strict=True)]
        )
        paths = [(*path, PathPart(p, p.length)) for p in parents]
        session = model.open_session(paths, [model.store.create() for _ in mine])
        index = torch.tensor([*mine, *[mine[0]] * (session.num_rows - len(mine))], device=device)
        for step in range(_STEPS):
            positions = _PROMPT + torch.tensor(lengths, device=device)[index] + step
            logits = decoder.logits(session.forward(tokens[index, step], positions))
            _, logprobs = sampler.sample(logits, keys[index], positions)
            found[mine, step] = logprobs[: len(mine)].float() + logits[: len(mine), 0].float()
        session.close()
    return found


def run_selftest() -> dict[str, bool]:
    """The self-test of every backend on a small random shape (`beamwright doctor`).

    Where there is a GPU, also of what runs on it, in tiles of fixed size and without.
    """
    text = "llama,layers=1,hidden=128,heads=4,kv_heads=2,intermediate=384,vocab=512,context=256"
    shape = shape_from_text(text)
    decoder = Decoder(shape, pack_weights(random_weights(shape, torch.float32, "cpu", 0)))
    found = {name: batches_are_exact(decoder, make_attention(name)) for name in BACKENDS}
    return {**found, **(_on_gpu(shape) if torch.cuda.is_available() else {})}


def _on_gpu(shape: ModelShape) -> dict[str, bool]:
    """The same on the first CUDA device, in the dtype that it computes in by default."""
    device = torch.device("cuda")
    weights = random_weights(shape, torch.bfloat16, "cuda", 0)
    names = [n for n in KERNEL_BACKENDS if why_no_kernels(device, torch.bfloat16) is None]
    found = {}
    for name in names or BACKENDS:
        backend = make_attention(name, device, torch.bfloat16)
        for label, tile_rows in (("", None), (", --deterministic", TILE_ROWS)):
            decoder = Decoder(shape, weights, tile_rows)
            found[f"{name} on cuda{label}"] = batches_are_exact(decoder, backend)
    return found

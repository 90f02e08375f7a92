"""Start-up self-test of sameness, layer 1: do a row's bits depend on the batch it stands in?

Probed on the machine at hand, because another CPU or another matrix library may differ (FACTS 6).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from beamwright.attention import BACKENDS, KERNEL_BACKENDS, make_attention
from beamwright.config import SamplingSettings
from beamwright.kv import PathPart
from beamwright.models import PrefillRequest, TreeModel
from beamwright.models.decoder import Decoder
from beamwright.models.named_shapes import shape_from_text
from beamwright.models.weights import random_weights
from beamwright.protocols import AttentionBackend
from beamwright.runtime.sampling import Sampler

_ROWS, _STEPS, _PROMPT = 21, 5, 13


@torch.inference_mode()
def batches_are_exact(decoder: Decoder, backend: AttentionBackend) -> bool:
    """True if rows decoded in one batch equal, bit for bit, the same rows in small batches.

    Runs the decoder's first layer and its LM head on a few random tokens. On a GPU, and of kernels
    that an interpreter runs, it says nothing, which is False.
    """
    if decoder.device.type != "cpu" or backend.name in KERNEL_BACKENDS:
        return False
    shape = replace(decoder.shape, layers=1)
    first = Decoder(shape, replace(decoder.weights, layers=decoder.weights.layers[:1]))
    whole = _logits(first, backend, [range(_ROWS)])
    return all(
        torch.equal(whole, _logits(first, backend, split))
        for split in (
            [range(row, row + 1) for row in range(_ROWS)],
            [range(3), range(3, 11), range(11, _ROWS)],
        )
    )


def _logits(decoder: Decoder, backend: AttentionBackend, split: list[range]) -> torch.Tensor:
    """Noisy logits [rows, steps, vocab] of a fixed set of rows, decoded in these batches."""
    generator = torch.Generator().manual_seed(0)
    vocab = decoder.shape.vocab
    prompt = torch.randint(vocab, (_PROMPT,), generator=generator).tolist()
    lengths = (1 + torch.arange(_ROWS) % 4).tolist()
    steps = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
    tokens = torch.randint(vocab, (_ROWS, _STEPS), generator=generator)
    keys = torch.randint(2**31 - 1, (_ROWS, 2), generator=generator).to(torch.int32)
    token_bytes = decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
    model = TreeModel(decoder, backend, 8192 * token_bytes)
    root = model.store.create()
    model.prefill([PrefillRequest((), root, prompt, 0)])
    path = (PathPart(root, _PROMPT),)
    found = torch.zeros(_ROWS, _STEPS)
    sampler = Sampler(SamplingSettings(), vocab, decoder.device)
    for batch in split:
        mine = list(batch)
        parents = [model.store.create() for _ in mine]
        model.prefill(
            [PrefillRequest(path, p, steps[i], _PROMPT) for i, p in zip(mine, parents, strict=True)]
        )
        paths = [(*path, PathPart(p, p.length)) for p in parents]
        session = model.open_session(paths, [model.store.create() for _ in mine])
        index = torch.tensor([*mine, *[mine[0]] * (session.num_rows - len(mine))])
        for step in range(_STEPS):
            positions = _PROMPT + torch.tensor(lengths)[index] + step
            logits = decoder.logits(session.forward(tokens[index, step], positions))
            _, logprobs = sampler.sample(logits, keys[index], positions)
            found[mine, step] = logprobs[: len(mine)].float() + logits[: len(mine), 0].float()
        session.close()
    return found


def run_selftest() -> dict[str, bool]:
    """The self-test of every backend on a small random shape (`beamwright doctor`)."""
    text = "llama,layers=1,hidden=128,heads=4,kv_heads=2,intermediate=384,vocab=512,context=256"
    shape = shape_from_text(text)
    decoder = Decoder(shape, random_weights(shape, torch.float32, "cpu", 0))
    return {name: batches_are_exact(decoder, make_attention(name)) for name in BACKENDS}

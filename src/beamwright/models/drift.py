"""Drift of quantised weights: logits beside those of the same model without, on fixed texts.

The models are loaded one after the other, so the larger one has to fit alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from beamwright.attention import make_attention
from beamwright.config import ModelSettings
from beamwright.models.load import LoadedModel, load_model
from beamwright.models.prefill import PrefillRequest
from beamwright.models.tree_model import TreeModel

Sample = tuple[str, str]
"""A problem, and a solution to it."""

_RANDOM_TOKENS = 48  # per sample, for a model without a tokenizer
_SEED = 2


def measure_drift(settings: ModelSettings, samples: Sequence[Sample]) -> dict[str, float]:
    """How far `settings.weights` moves the generator's logits where a solution is written.

    tokens: logit vectors compared. max_abs_logit_diff, mean_abs_logit_diff: over all of them.
    mean_kl_nats: of the unquantised next-token distribution from the quantised one.
    top1_agreement: share of tokens whose most likely successor is the same.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: as loading the model does.
    """
    plain = settings.model_copy(update={"weights": "auto"})
    expected = _logits(plain, samples)
    return compare_logits(expected, _logits(settings, samples))


def compare_logits(expected: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
    """The figures of `measure_drift` from logits [tokens, vocab], the unquantised model's first."""
    diff = (found - expected).abs()
    log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    same = expected.argmax(-1) == found.argmax(-1)
    return {
        "tokens": expected.shape[0],
        "max_abs_logit_diff": float(diff.max()),
        "mean_abs_logit_diff": float(diff.mean()),
        "mean_kl_nats": float(kl.mean()),
        "top1_agreement": float(same.float().mean()),
    }


@torch.inference_mode()
def _logits(settings: ModelSettings, samples: Sequence[Sample]) -> torch.Tensor:
    """Logits [tokens, vocab] behind every token of the solutions, in float32 on the CPU."""
    loaded = load_model(settings.model, settings, chat_template=settings.chat_template)
    decoder = loaded.decoder
    found: list[torch.Tensor] = []
    for first, token_ids in _token_ids(loaded, settings, samples):
        room = 2 * len(token_ids) + 256
        budget = room * decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
        model = TreeModel(decoder, make_attention(settings.attention), budget)
        hidden = model.prefill([PrefillRequest((), model.store.create(), token_ids, 0)])[0]
        found.append(decoder.logits(hidden[first:]).float().cpu())
    return torch.cat(found)


def _token_ids(
    loaded: LoadedModel, settings: ModelSettings, samples: Sequence[Sample]
) -> list[tuple[int, list[int]]]:
    """Token ids of each sample, and the index of its first token whose logits count."""
    shape = loaded.decoder.shape
    found: list[tuple[int, list[int]]] = []
    generator = torch.Generator().manual_seed(_SEED)
    for problem, solution in samples:
        if loaded.codec is None:
            size = (min(_RANDOM_TOKENS, shape.context),)
            found.append((0, torch.randint(shape.vocab, size, generator=generator).tolist()))
            continue
        prompt = loaded.codec.render(problem, settings.system_prompt)
        token_ids = [*prompt, *loaded.codec.encode(solution)][: shape.context]
        found.append((min(len(prompt), len(token_ids)) - 1, token_ids))
    return found

"""A checkpoint: parity with `transformers`, and what quantised weights change.

Parity is the same random token ids three ways to the logits. Of quantised weights: a generator's
logits, a verifier's scores, a search's answers. The models are loaded one after the other, so the
larger one has to fit alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from beamwright.attention import make_attention
from beamwright.config import Settings
from beamwright.engine.selftest import batches_are_exact
from beamwright.errors import InputError
from beamwright.evaluate import RunOptions, load_problems, run
from beamwright.evaluate.problems import bundled_samples
from beamwright.kv.segments import Path, PathPart
from beamwright.models.decoder import Decoder
from beamwright.models.load import LoadedModel, load_model, read_reference
from beamwright.models.tree_model import PrefillRequest, TreeModel
from beamwright.sections import ModelSettings, SearchSettings
from beamwright.solver.solver import Solver
from beamwright.verify.find import resolve_verifier
from beamwright.verify.show import chain_of_steps

Sample = tuple[str, str]
"""A problem, and a solution to it."""

_PARITY_TOKENS, _CHUNK = 48, 7
_NUM_SAMPLES, _RANDOM_TOKENS = 8, 48  # of a sample, for a model without a tokenizer
_KV_TOKENS = 8192  # what one sample's steps may need
_SEARCH = SearchSettings(n=4, width=2)


# --- parity ----------------------------------------------------------------------------------


def check_parity(settings: ModelSettings) -> dict[str, float]:
    """Largest absolute logit difference to `transformers`: prefill, chunked, decode.

    "prefill" runs the ids in one go, "chunked" in chunks of 7, "decode" token by token through
    the paged tree store, with the ids split over a chain of nodes.
    """
    if settings.model.startswith("random:"):
        raise InputError("--parity needs a checkpoint folder, not random weights")
    loaded = load_model(settings.model, settings)
    decoder, attention = loaded.decoder, settings.attention
    generator = torch.Generator().manual_seed(1)
    num_tokens = min(_PARITY_TOKENS, decoder.shape.context)
    token_ids = torch.randint(decoder.shape.vocab, (num_tokens,), generator=generator).tolist()
    assert loaded.folder is not None
    reference = read_reference(loaded.folder, decoder.dtype).to(decoder.device).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids], device=decoder.device)).logits[0]
    ways = {
        "prefill": _prefill(decoder, attention, token_ids, num_tokens),
        "chunked": _prefill(decoder, attention, token_ids, _CHUNK),
        "decode": _decode(decoder, attention, token_ids),
    }
    return {way: float((logits - expected).abs().max()) for way, logits in ways.items()}


def _tree_model(decoder: Decoder, attention: str, num_tokens: int, *chunk: int) -> TreeModel:
    budget = num_tokens * decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
    backend = make_attention(attention, decoder.device, decoder.dtype)
    return TreeModel(decoder, backend, budget, *chunk)


@torch.inference_mode()
def _prefill(
    decoder: Decoder, attention: str, token_ids: Sequence[int], *chunk: int
) -> torch.Tensor:
    """Logits [tokens, vocab] behind every token."""
    model = _tree_model(decoder, attention, 2 * len(token_ids) + 256, *chunk)
    hidden = model.prefill([PrefillRequest((), model.store.create(), token_ids, 0)])[0]
    return decoder.logits(hidden)


@torch.inference_mode()
def _decode(decoder: Decoder, attention: str, token_ids: list[int]) -> torch.Tensor:
    """Every token after the first is decoded; a new node starts every 5, 10, 15, ... tokens."""
    model = _tree_model(decoder, attention, 2048)
    root = model.store.create()
    hidden = [model.prefill([PrefillRequest((), root, token_ids[:1], 0)])[0]]
    path: Path = (PathPart(root, 1),)
    position, step = 1, 5
    while position < len(token_ids):
        segment = model.store.create()
        session = model.open_session([path], [segment])
        tokens = token_ids[position : position + step]
        for offset, token in enumerate(tokens):
            rows = (session.num_rows,)
            states = session.forward(torch.full(rows, token), torch.full(rows, position + offset))
            hidden.append(states[:1])
        session.store({0: len(tokens)})
        session.close()
        path = (*path, PathPart(segment, len(tokens)))
        position, step = position + len(tokens), step + 5
    return decoder.logits(torch.cat(hidden))


# --- quantised weights -----------------------------------------------------------------------


def check_weights(settings: ModelSettings, num_problems: int) -> dict[str, Any]:
    """What quantised weights change: the models' outputs, and answers to bundled problems.

    num_problems: of bundled:dev, each searched with and without quantised weights; 0: none.
    """
    samples = bundled_samples(_NUM_SAMPLES)
    report: dict[str, Any] = {}
    if settings.weights != "auto":
        decoder = load_model(settings.model, settings).decoder
        backend = make_attention(settings.attention, decoder.device, decoder.dtype)
        report["exact"] = batches_are_exact(decoder, backend)
        del decoder
        report["drift"] = measure_drift(settings, samples)
    if settings.verifier_weights != "auto":
        report["verifier_drift"] = measure_score_drift(settings, samples)
    if num_problems and not settings.model.startswith("random:"):
        report["accuracy"] = _accuracy_change(settings, num_problems)
    return report


def _unquantised(settings: ModelSettings) -> ModelSettings:
    return settings.model_copy(update={"weights": "auto", "verifier_weights": "auto"})


def _accuracy_change(settings: ModelSettings, num_problems: int) -> dict[str, Any]:
    """Beam search on the first problems of bundled:dev, without and with quantised weights."""
    problem_set = load_problems("bundled:dev", num_problems)
    accuracies, answers = [], []
    for model in (_unquantised(settings), settings):
        records: list[Any] = []
        options = RunOptions(on_record=partial(_keep, records))
        run_settings = Settings(model=model, search=_SEARCH)
        with Solver(run_settings) as solver:
            result = run(problem_set, solver.solve_many, run_settings, options)
        accuracies.append(result["accuracy"])
        answers.append({record.unique_id: record.answer for record in records})
    before, after = answers
    return {
        "problems": len(before),
        "n": _SEARCH.n,
        "unquantised": accuracies[0],
        "quantised": accuracies[1],
        "same_answers": sum(before[name] == after[name] for name in before),
    }


def _keep(records: list[Any], record: Any, done: int, total: int) -> None:
    del done, total
    records.append(record)


def measure_drift(settings: ModelSettings, samples: Sequence[Sample]) -> dict[str, float]:
    """How far `settings.weights` moves the generator's logits where a solution is written.

    tokens: logit vectors compared. max_abs_logit_diff, mean_abs_logit_diff: over all of them.
    mean_kl_nats: of the unquantised next-token distribution from the quantised one.
    top1_agreement: share of tokens whose most likely successor is the same.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: as loading the model does.
    """
    return compare_logits(_logits(_unquantised(settings), samples), _logits(settings, samples))


def compare_logits(expected: torch.Tensor, logits: torch.Tensor) -> dict[str, float]:
    """The figures of `measure_drift` from logits [tokens, vocab], the unquantised model's first."""
    diff = (logits - expected).abs()
    log_p, log_q = expected.log_softmax(-1), logits.log_softmax(-1)
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    same = expected.argmax(-1) == logits.argmax(-1)
    return {
        "tokens": expected.shape[0],
        "max_abs_logit_diff": float(diff.max()),
        "mean_abs_logit_diff": float(diff.mean()),
        "mean_kl_nats": float(kl.mean()),
        "top1_agreement": float(same.float().mean()),
    }


def _logits(settings: ModelSettings, samples: Sequence[Sample]) -> torch.Tensor:
    """Logits [tokens, vocab] behind every token of the solutions, in float32 on the CPU."""
    loaded = load_model(settings.model, settings, chat_template=settings.chat_template)
    generator = torch.Generator().manual_seed(2)
    parts: list[torch.Tensor] = []
    for sample in samples:
        first, token_ids = _token_ids(loaded, settings, sample, generator)
        logits = _prefill(loaded.decoder, settings.attention, token_ids)
        parts.append(logits[first:].float().cpu())
    return torch.cat(parts)


def _token_ids(
    loaded: LoadedModel, settings: ModelSettings, sample: Sample, generator: torch.Generator
) -> tuple[int, list[int]]:
    """The index of a sample's first token whose logits count, and its token ids."""
    shape, (problem, solution) = loaded.decoder.shape, sample
    if loaded.codec is None:
        size = (min(_RANDOM_TOKENS, shape.context),)
        return 0, torch.randint(shape.vocab, size, generator=generator).tolist()
    prompt = loaded.codec.render(problem, settings.system_prompt)
    token_ids = [*prompt, *loaded.codec.encode(solution)][: shape.context]
    return min(len(prompt), len(token_ids)) - 1, token_ids


def measure_score_drift(settings: ModelSettings, samples: Sequence[Sample]) -> dict[str, float]:
    """How far `settings.verifier_weights` moves the scores of the steps of these solutions.

    samples: problems and solutions, whose steps end with a blank line.
    steps: how many have a score both ways. max_abs_score_diff, mean_abs_score_diff: over them.

    Raises:
        InputError: if the verifier has no weights, or scores none of the steps.
    """
    plain, quantised = (_step_scores(s, samples) for s in (_unquantised(settings), settings))
    pairs = zip(plain, quantised, strict=True)
    diffs = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    if not diffs:
        raise InputError(f"--verifier {settings.scorer}: it scores none of the sample steps")
    return {
        "steps": len(diffs),
        "max_abs_score_diff": max(diffs),
        "mean_abs_score_diff": sum(diffs) / len(diffs),
    }


def _step_scores(settings: ModelSettings, samples: Sequence[Sample]) -> list[float | None]:
    source = resolve_verifier(settings)
    if source.model is None:
        raise InputError(
            f"--verifier-weights {settings.verifier_weights}: "
            f"--verifier {settings.scorer} has no weights"
        )
    scores: list[float | None] = []
    for number, sample in enumerate(samples):
        verifier = source.on(_tree_model(source.model.decoder, settings.attention, _KV_TOKENS))
        for node in chain_of_steps(number, *sample):
            scores += verifier.score([node])
    return scores

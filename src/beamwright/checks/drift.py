"""What quantised weights change: a generator's logits, a verifier's scores, a search's answers.

The models are loaded one after the other, so the larger one has to fit alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from beamwright.attention import make_attention
from beamwright.config import Settings
from beamwright.engine.selftest import batches_are_exact
from beamwright.errors import InputError
from beamwright.evaluate import RunOptions, load_problems, run
from beamwright.evaluate.problems import bundled_samples
from beamwright.models import LoadedModel, PrefillRequest, TreeModel, load_model
from beamwright.sections import ModelSettings, SearchSettings
from beamwright.solver.solver import Solver
from beamwright.verify.find import resolve_verifier
from beamwright.verify.show import chain_of_steps

Sample = tuple[str, str]
"""A problem, and a solution to it."""

_DRIFT_SAMPLES = 8
_ACCURACY_SEARCH = SearchSettings(n=4, width=2)
_KV_TOKENS = 8192  # what one sample's steps may need
_RANDOM_TOKENS = 48  # per sample, for a model without a tokenizer
_SEED = 2


def check_weights(settings: ModelSettings, num_problems: int) -> dict[str, Any]:
    """What quantised weights change: the models' outputs, and answers to bundled problems.

    num_problems: of bundled:dev, each searched with and without quantised weights; 0: none.
    """
    samples = bundled_samples(_DRIFT_SAMPLES)
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


def _accuracy_change(settings: ModelSettings, num_problems: int) -> dict[str, Any]:
    """Beam search on the first problems of bundled:dev, without and with quantised weights."""
    problem_set = load_problems("bundled:dev", num_problems)
    plain = settings.model_copy(update={"weights": "auto", "verifier_weights": "auto"})
    results, answers = [], []
    for each in (plain, settings):
        found: dict[str, str | None] = {}

        def keep(record: Any, done: int, total: int, found: dict[str, Any] = found) -> None:
            found[record.unique_id] = record.answer

        run_settings = Settings(model=each, search=_ACCURACY_SEARCH)
        with Solver(run_settings) as solver:
            results.append(
                run(problem_set, solver.solve_many, run_settings, RunOptions(on_record=keep))
            )
        answers.append(found)
    before, after = answers
    return {
        "problems": len(before),
        "n": _ACCURACY_SEARCH.n,
        "unquantised": results[0]["accuracy"],
        "quantised": results[1]["accuracy"],
        "same_answers": sum(before[name] == after[name] for name in before),
    }


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


def measure_score_drift(settings: ModelSettings, samples: Sequence[Sample]) -> dict[str, float]:
    """How far `settings.verifier_weights` moves the scores of the steps of these solutions.

    samples: problems and solutions, whose steps end with a blank line.
    steps: how many have a score both ways. max_abs_score_diff, mean_abs_score_diff: over them.

    Raises:
        InputError: if the verifier has no weights, or scores none of the steps.
    """
    plain = settings.model_copy(update={"verifier_weights": "auto"})
    pairs = zip(_step_scores(plain, samples), _step_scores(settings, samples), strict=True)
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
    decoder = source.model.decoder
    budget = _KV_TOKENS * decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
    found: list[float | None] = []
    for number, sample in enumerate(samples):
        model = TreeModel(decoder, make_attention(settings.attention), budget)
        verifier = source.on(model)
        for node in chain_of_steps(number, *sample):
            found += verifier.score([node])
    return found

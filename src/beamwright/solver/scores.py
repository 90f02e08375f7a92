"""Which scores a solver keeps: `--score-cache`."""

from __future__ import annotations

from pathlib import Path

import torch

from beamwright.engine.selftest import sample_bits
from beamwright.errors import InputError
from beamwright.protocols import Verifier
from beamwright.verify import PrmVerifier
from beamwright.verify.score_cache import IN_MEMORY, ScoreCache, scorer_identity


def check_scores_kept(named: str | None, verifier: Verifier) -> None:
    """See that there is something to keep.

    Raises:
        InputError: for a verifier whose scores are no function of the path, or cost nothing.
    """
    if named is not None and not isinstance(verifier, PrmVerifier):
        raise InputError(
            f"--score-cache {named}: needs a process reward model; scores of judges, of functions "
            "and of the generator's own statistics are not kept"
        )


def keep_scores(
    named: str | None, verifier: Verifier, num_threads: int, *, exact: bool
) -> ScoreCache | None:
    """Have a verifier look scores up; None where none are kept: not asked for, or not `exact`.

    Products of float64 depend on the batch, whatever the self-test has seen ("Sameness").
    named: `memory`, or a file.

    Raises:
        InputError: if the file is damaged, or cannot be used.
    """
    if named is None or not exact or not isinstance(verifier, PrmVerifier):
        return None
    if verifier.model.decoder.dtype == torch.float64:
        return None
    if named == IN_MEMORY:
        scores = ScoreCache(b"\0")
    else:
        attention, sample = verifier.tree_model.backend.name, sample_bits(verifier.model.decoder)
        spec, model = verifier.spec, verifier.model
        identity = scorer_identity(spec, model, attention, num_threads, sample)
        scores = ScoreCache(identity, Path(named))
    verifier.remember(scores)
    return scores

"""Verifiers: declared formats, heads, judges, scores and their aggregation. KV is on the tree.

`resolve_verifier` reads what `--verifier` names; a family is a row in `families/`.
"""

from typing import TYPE_CHECKING

from beamwright.lazy import lazy_names
from beamwright.verify.aggregate import aggregate

if TYPE_CHECKING:
    from beamwright.verify.confidence import (
        DeepConfVerifier,
        EntropyVerifier,
        LogprobVerifier,
        MinLogprobVerifier,
        NoVerifier,
    )
    from beamwright.verify.detect import families, family_spec, load_spec
    from beamwright.verify.function import CallableVerifier, ObjectVerifier, ScoreFunction
    from beamwright.verify.judge_prompt import load_judge
    from beamwright.verify.make import VerifierSource, declared_verifier, resolve_verifier
    from beamwright.verify.prm import PrmVerifier
    from beamwright.verify.spec import VerifierSpec

__all__ = [
    "CallableVerifier",
    "DeepConfVerifier",
    "EntropyVerifier",
    "LogprobVerifier",
    "MinLogprobVerifier",
    "NoVerifier",
    "ObjectVerifier",
    "PrmVerifier",
    "ScoreFunction",
    "VerifierSource",
    "VerifierSpec",
    "aggregate",
    "declared_verifier",
    "families",
    "family_spec",
    "load_judge",
    "load_spec",
    "resolve_verifier",
]

__getattr__ = lazy_names(
    __name__,
    {
        "CallableVerifier": "function",
        "DeepConfVerifier": "confidence",
        "EntropyVerifier": "confidence",
        "LogprobVerifier": "confidence",
        "MinLogprobVerifier": "confidence",
        "NoVerifier": "confidence",
        "ObjectVerifier": "function",
        "PrmVerifier": "prm",
        "ScoreFunction": "function",
        "VerifierSource": "make",
        "VerifierSpec": "spec",
        "declared_verifier": "make",
        "families": "detect",
        "family_spec": "detect",
        "load_judge": "judge_prompt",
        "load_spec": "detect",
        "resolve_verifier": "make",
    },
)

"""Verifiers: declared formats, heads, scores and their aggregation. KV of a PRM is on the tree.

`resolve_verifier` reads what `--verifier` names; a family is a row in `families/`.
"""

from beamwright.verify.aggregate import AGGREGATES, aggregate
from beamwright.verify.confidence import (
    DeepConfVerifier,
    EntropyVerifier,
    LogprobVerifier,
    MinLogprobVerifier,
    NoVerifier,
)
from beamwright.verify.detect import families, family_spec, load_spec
from beamwright.verify.function import CallableVerifier, ScoreFunction
from beamwright.verify.make import VerifierSource, resolve_verifier
from beamwright.verify.prm import PrmVerifier
from beamwright.verify.spec import VerifierSpec

__all__ = [
    "AGGREGATES",
    "CallableVerifier",
    "DeepConfVerifier",
    "EntropyVerifier",
    "LogprobVerifier",
    "MinLogprobVerifier",
    "NoVerifier",
    "PrmVerifier",
    "ScoreFunction",
    "VerifierSource",
    "VerifierSpec",
    "aggregate",
    "families",
    "family_spec",
    "load_spec",
    "resolve_verifier",
]

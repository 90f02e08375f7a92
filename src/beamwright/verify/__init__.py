"""Verifiers: declared formats, heads, scores and their aggregation. KV of a PRM is on the tree.

`make_verifier` reads `PATH | bundled | likelihood:PATH | logprob | none`.
"""

from beamwright.verify.aggregate import AGGREGATES, aggregate
from beamwright.verify.confidence import LogprobVerifier, NoVerifier
from beamwright.verify.make import VerifierSource, resolve_verifier
from beamwright.verify.prm import PrmVerifier
from beamwright.verify.spec import VerifierSpec, load_spec

__all__ = [
    "AGGREGATES",
    "LogprobVerifier",
    "NoVerifier",
    "PrmVerifier",
    "VerifierSource",
    "VerifierSpec",
    "aggregate",
    "load_spec",
    "resolve_verifier",
]

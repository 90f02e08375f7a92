"""Sparse decoding: which tokens of a long path a step attends to. Knows no tree, no tiers.

One row of a table per way to select (`rule.METHODS`); predictors of the next query beside it.
"""

from beamwright.sparse.home import HomeStore
from beamwright.sparse.predict import PREDICTORS, Predict, overlap
from beamwright.sparse.rotary import Rotary
from beamwright.sparse.rule import METHODS, Method, SparseRule
from beamwright.sparse.view import SparseAttention

__all__ = [
    "METHODS",
    "PREDICTORS",
    "HomeStore",
    "Method",
    "Predict",
    "Rotary",
    "SparseAttention",
    "SparseRule",
    "overlap",
]

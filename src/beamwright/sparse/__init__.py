"""Sparse decoding: which tokens of a long path a step attends to. Knows no tree, no tiers."""

from beamwright.sparse.predict import PREDICTORS, Predict, overlap

__all__ = ["PREDICTORS", "Predict", "overlap"]

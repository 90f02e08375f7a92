"""Sparse decoding: which tokens of a long path a step attends to. Knows no tree, no tiers.

One row of a table per way to select (`rule.METHODS`).
"""

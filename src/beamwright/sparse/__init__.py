"""Sparse decoding: a step attends to selected tokens of a long path. Knows no tree, no tiers.

The table `rule.METHODS` has one row per way to select.
"""

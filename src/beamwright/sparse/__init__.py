"""Sparse decoding (`--sparse`): a token attends to selected tokens of a long path, not to all.

The table `rule.METHODS` has one row per method, such as Quest and AsyncSpade.
"""

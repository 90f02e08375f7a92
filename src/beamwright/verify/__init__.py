"""Verifiers: declared formats, heads, judges, scorers of a step's own tokens. KV is on the tree.

`find.resolve_verifier` reads what `--verifier` names; a family is a file in `families/`.
"""

"""Verifiers: reward models in declared formats, judges, and scorers without a second model.

`find.resolve_verifier` creates the verifier that `--verifier` names. Each file in `families/`
declares a family of reward models. A reward model's KV is kept per node of the search tree.
"""

"""Hugging Face checkpoints to one decoder with flags; its KV on the tree; tokenizer and template.

Knows no search strategy and no verifier format.
"""

"""Loads Hugging Face and GGUF checkpoints, and runs their models: prefill, decode and tokenizer.

No module here knows a search strategy or how a verifier scores.
"""

"""Scheduling rules of vLLM and SGLang, as baselines of tree search.

As search-and-learn does, a client sends every step of every beam as a new prompt, and the engine
reuses its prefix cache. These classes count tokens and blocks, without torch or time; the rules are
from the sources of vLLM 0.33 and SGLang 0.5.23.
"""

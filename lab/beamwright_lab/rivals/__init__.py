"""Scheduling rules of serving engines, as baselines: what vLLM and SGLang do with a tree search.

Such an engine gets every step of every beam as a prompt of its own, as search-and-learn and its
like send it, and finds what it has seen before in its prefix cache. Counts of tokens and blocks
only: no torch, no clock, no seconds. Read from the sources of vLLM 0.33 and SGLang 0.5.23.
"""

"""The server: an OpenAI-compatible API, a live page of every search, metrics.

Knows the solver and what a tree looks like from outside. Needs the extra `serve`.
"""

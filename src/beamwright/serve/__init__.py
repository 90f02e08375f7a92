"""The server: an OpenAI-compatible API over one solver, a live page of its trees, metrics.

A request becomes `SearchJob`s, a `RequestQueue` has them searched beside the others, and what is
final of a tree goes out while the rest is being decided (`answers`). Needs the extra `serve`.
"""

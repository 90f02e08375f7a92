"""The server: an OpenAI-compatible API over one solver, a live page of its trees, metrics.

Each request becomes one or more `SearchJob`s. A `RequestQueue` submits them to the solver, which
searches them in one batch with the jobs of other requests. A stream sends text as soon as it is
final, while the search still decides the rest (`answers`). Needs the extra `serve`.
"""

"""The server: an OpenAI-compatible API over one solver, a live page of its trees, metrics.

Each request becomes one or more `SearchJob`s. A `RequestQueue` submits the jobs to the solver,
which decodes the jobs of all requests in one batch. A stream sends text as soon as no later
decision of the search can change it (`answers`). Needs the extra `serve`.
"""

"""ServerLimits: what one request, and all of them together, may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server.

    requests: that are searched or wait, requests_per_key: of these, one API key's; one more is told
    to come later (429). n: candidates of one search. tokens: generated for one search. seconds: for
    one search, waiting included; then the best so far is the answer. body_bytes, depth, values: of
    a request's JSON; bodies_bytes: of all bodies that are here, beyond 64 KiB of each. drain_s:
    after SIGTERM, until what still runs is ended with the best so far.
    """

    requests: int = 64
    requests_per_key: int = 64
    n: int = 512
    tokens: int = 1_000_000
    seconds: float = 600.0
    body_bytes: int = 4 * 2**20
    bodies_bytes: int = 64 * 2**20
    depth: int = 64
    values: int = 2**18
    drain_s: float = 30.0

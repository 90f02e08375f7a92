"""Prometheus metrics of a server, and the gauges of its page: one listener, read when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import Counter, Histogram
from prometheus_client.registry import Collector

from beamwright.counters import Usage
from beamwright.protocols import RoundReport
from beamwright.serve.desk import Desk, Job
from beamwright.serve.engine import Replicas
from beamwright.solver.solution import Solution
from beamwright.solver.solver import Solver

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_RATES = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counts what a desk's jobs do. registry: of this server alone."""

    def __init__(self, desk: Desk) -> None:
        self.registry = CollectorRegistry()
        self._desk, self._lock = desk, threading.Lock()
        self._rounds_s: dict[str, float] = {}
        self.registry.register(_Moment(desk))
        named: dict[str, Any] = {"registry": self.registry, "namespace": "beamwright"}
        self._requests = Counter("requests", "Searches that ended.", ["outcome"], **named)
        self._tokens = Counter(
            "tokens", "Tokens: prompt, generated; of these kept, overrun, speculated, speculated "
            "and kept; and those that the verifier read.", ["kind"], **named
        )  # fmt: skip
        self._first_s = Histogram(
            "time_to_first_text_seconds", "From a request to final text.", buckets=_SECONDS, **named
        )
        self._search_s = Histogram(
            "search_seconds", "From a request to its answer.", buckets=_SECONDS, **named
        )
        self._round_s = Histogram(
            "round_seconds", "From one round's decision to the next.", buckets=_SECONDS, **named
        )
        self._goodput = Histogram(
            "goodput_tokens_per_second", "FlashTTS's goodput of a search.", buckets=_RATES, **named
        )
        self._verifier_steps = Histogram(
            "verifier_steps_per_call",
            "Steps that the verifier scores at a time, in the mean while a search was in flight: "
            "its occupancy.",
            buckets=_STEPS,
            **named,
        )

    # --- a listener of the desk --------------------------------------------------------------

    def begun(self, job: Job) -> None:
        """A search waits, or begins."""
        self._tokens.labels("prompt").inc(job.prompt_tokens)

    def round(self, job: Job, report: RoundReport) -> None:
        """In the solver's thread."""
        del report
        with self._lock:
            now = time.monotonic()
            before = self._rounds_s.get(job.id, job.began_s)
            self._rounds_s[job.id] = now
        self._round_s.observe(now - before)

    def ended(self, job: Job, outcome: Solution | BaseException) -> None:
        """It has a solution, or none."""
        with self._lock:
            self._rounds_s.pop(job.id, None)
        self._requests.labels(job.state).inc()
        seconds = time.monotonic() - job.began_s
        self._search_s.observe(seconds)
        found = outcome if isinstance(outcome, Solution) else getattr(outcome, "partial", None)
        if not isinstance(found, Solution):
            return
        if isinstance(outcome, Solution):
            self._first_s.observe(job.first_text_s or seconds)
        tokens = found.tokens
        for kind, number in (
            ("generated", tokens.generated),
            ("kept", tokens.kept),
            ("overrun", tokens.overrun),
            ("speculated", tokens.speculated),
            ("speculated_kept", tokens.speculated_kept),
            ("verifier", tokens.verifier_prefilled + tokens.verifier_generated),
        ):
            self._tokens.labels(kind).inc(number)
        if found.goodput_tok_s is not None:
            self._goodput.observe(found.goodput_tok_s)
        if found.batch.verifier_steps_mean is not None:
            self._verifier_steps.observe(found.batch.verifier_steps_mean)

    # --- who reads ---------------------------------------------------------------------------

    def routes(self) -> APIRouter:
        """`GET /metrics`."""
        routes = APIRouter()

        @routes.get("/metrics")
        def metrics() -> Response:
            return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

        return routes

    def gauges(self) -> list[dict[str, Any]]:
        """What the page shows of this moment, see `feed_routes.Gauges`."""
        used, jobs = self._desk.solver.usage(), list(self._desk.jobs.values())
        running = sum(job.state == "running" for job in jobs)
        found: list[dict[str, Any]] = [
            {"name": "searches", "value": running},
            {"name": "waiting", "value": len(jobs) - running},
            {"name": "tokens", "total": used.engine.row_tokens, "unit": "tokens"},
        ]
        for (name, tier), level in used.levels.items():
            if tier == "device" or level.used_bytes:
                where = "" if tier == "device" else f" on the {tier}"
                found.append(
                    {
                        "name": f"{name}'s KV{where}", "value": level.used_bytes,
                        "unit": "bytes", "of": level.budget_bytes,
                    }
                )  # fmt: skip
        for direction, moved in _crossed(used).items():
            found.append({"name": f"link, {direction}", "total": moved, "unit": "bytes"})
        return found


def _crossed(used: Usage) -> dict[str, int]:
    """Bytes that crossed the link, where there is one."""
    engine = used.engine
    return {"h2d": engine.h2d_bytes, "d2h": engine.d2h_bytes} if used.has_link else {}


class _Moment(Collector):
    """What is read when somebody asks."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterable[Metric]:
        """All families."""
        jobs = [job.state for job in list(self._desk.jobs.values())]
        requests = GaugeMetricFamily(
            "beamwright_requests_now", "Searches that run or wait.", labels=["state"]
        )
        for state in ("running", "waiting"):
            requests.add_metric([state], jobs.count(state))
        yield requests
        used = self._desk.solver.usage()
        yield from _kv(used)
        yield from _work(used)
        if not isinstance(self._desk.solver, Solver):
            yield from _replicas(self._desk.solver)


def _kv(used: Usage) -> Iterator[Metric]:
    held = GaugeMetricFamily("beamwright_kv_bytes", "KV by tier.", labels=["model", "tier"])
    budgets = GaugeMetricFamily(
        "beamwright_kv_budget_bytes", "Most KV that there may be.", labels=["model", "tier"]
    )
    cached = CounterMetricFamily(
        "beamwright_cache_tokens",
        "Tokens of KV that were needed; of these prefilled, loaded, recomputed: the rest was hit.",
        labels=["model", "kind"],
    )
    stalls = CounterMetricFamily(
        "beamwright_stall_seconds", "Waiting for transfers of KV.", labels=["model"]
    )
    for (name, tier), level in used.levels.items():
        held.add_metric([name, tier], level.used_bytes)
        budgets.add_metric([name, tier], level.budget_bytes)
    for name, counted in used.counters.items():
        if name != "engine":
            cached.add_metric([name, "needed"], counted.needed_tokens)
            cached.add_metric([name, "prefilled"], counted.prefilled_tokens)
            cached.add_metric([name, "loaded"], counted.loaded_tokens)
            cached.add_metric([name, "recomputed"], counted.dropped_tokens)
            stalls.add_metric([name], counted.transfer_wait_s)
    yield from (held, budgets, cached, stalls)


def _replicas(engine: Replicas) -> Iterator[Metric]:
    """What is above is of all of them together."""
    found = engine.replicas()
    yield GaugeMetricFamily("beamwright_replicas", "That are there.", value=len(found))
    yield CounterMetricFamily("beamwright_replica_deaths", "Since it began.", value=engine.deaths)
    yield CounterMetricFamily(
        "beamwright_searches_restarted",
        "Begun again because a replica died.",
        value=engine.restarts,
    )
    searches = GaugeMetricFamily(
        "beamwright_replica_searches", "That it was given.", labels=["replica"]
    )
    queued = GaugeMetricFamily(
        "beamwright_replica_queued_tokens",
        "That its searches are expected to take yet: what routing goes by.",
        labels=["replica"],
    )
    held = GaugeMetricFamily(
        "beamwright_replica_kv_bytes", "KV on its device.", labels=["replica", "model"]
    )
    rows = CounterMetricFamily(
        "beamwright_replica_row_tokens", "Tokens that its rows wrote.", labels=["replica"]
    )
    for each in found:
        searches.add_metric([each.name], each.searches)
        queued.add_metric([each.name], each.tokens)
        rows.add_metric([each.name], each.usage.engine.row_tokens)
        for (name, tier), level in each.usage.levels.items():
            if tier == "device":
                held.add_metric([each.name, name], level.used_bytes)
    yield from (searches, queued, held, rows)


def _work(used: Usage) -> Iterator[Metric]:
    link = CounterMetricFamily(
        "beamwright_link_bytes", "KV that crossed the link.", labels=["direction"]
    )
    for direction, moved in _crossed(used).items():
        link.add_metric([direction], moved)
    rows = CounterMetricFamily(
        "beamwright_row_tokens",
        "Tokens of the running batch: of rows that wrote one, and of all that were computed; their "
        "quotient is the generator's occupancy.",
        labels=["kind"],
    )
    rows.add_metric(["written"], used.engine.row_tokens)
    rows.add_metric(["computed"], used.engine.slot_tokens)
    yield from (link, rows)
    yield CounterMetricFamily(
        "beamwright_iterations", "Of the running batch.", value=used.engine.iterations
    )
    yield CounterMetricFamily(
        "beamwright_preempted",
        "Rows that left in the middle of a step.",
        value=used.engine.preempted,
    )

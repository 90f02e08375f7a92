"""What a server says of itself: Prometheus metrics, the gauges of its page, and its health.

A listener of the queue counts what ends; everything else is read when somebody asks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter as CountOf
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import Counter, Histogram
from prometheus_client.registry import Collector

from beamwright.counters import Usage
from beamwright.protocols import RoundReport
from beamwright.serve.job import SearchJob
from beamwright.serve.queue import RequestQueue
from beamwright.solver.solution import Solution
from beamwright.solver.solver import Solver

if TYPE_CHECKING:
    from beamwright.cluster.solver import ClusterSolver
    from beamwright.serve.queue import Engine

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_text_seconds": ("From a request to final text.", _SECONDS),
    "search_seconds": ("From a request to its answer.", _SECONDS),
    "round_seconds": ("From one round's decision to the next.", _SECONDS),
    "goodput_tokens_per_second": (
        "FlashTTS's goodput of a search.", (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000),
    ),
    "verifier_steps_per_call": (
        "Steps that the verifier scores at a time, in the mean while a search was in flight: "
        "its occupancy.",
        (1, 2, 4, 8, 16, 32, 64, 128, 256),
    ),
}  # fmt: skip


class Metrics(Collector):
    """Counts what a queue's jobs do. registry: of this server alone."""

    def __init__(self, queue: RequestQueue) -> None:
        self.registry = CollectorRegistry()
        self._queue, self._lock = queue, threading.Lock()
        self._rounds_s: dict[str, float] = {}
        self.registry.register(self)
        named: dict[str, Any] = {"registry": self.registry, "namespace": "beamwright"}
        self._requests = Counter("requests", "Searches that ended.", ["outcome"], **named)
        self._tokens = Counter(
            "tokens", "Tokens: prompt, generated; of these kept, overrun, speculated, speculated "
            "and kept; and those that the verifier read.", ["kind"], **named
        )  # fmt: skip
        self._histograms = {
            name: Histogram(name, said, buckets=buckets, **named)
            for name, (said, buckets) in _HISTOGRAMS.items()
        }

    # --- a listener of the queue -------------------------------------------------------------

    def begun(self, job: SearchJob) -> None:
        """A search waits, or begins."""
        self._tokens.labels("prompt").inc(job.prompt_tokens)

    def round(self, job: SearchJob, report: RoundReport) -> None:
        """In the solver's thread."""
        del report
        with self._lock:
            now = time.monotonic()
            before = self._rounds_s.get(job.id, job.began_s)
            self._rounds_s[job.id] = now
        self._observe("round_seconds", now - before)

    def ended(self, job: SearchJob, outcome: Solution | BaseException) -> None:
        """It has a solution, or none."""
        with self._lock:
            self._rounds_s.pop(job.id, None)
        self._requests.labels(job.state).inc()
        seconds = time.monotonic() - job.began_s
        self._observe("search_seconds", seconds)
        solution = outcome if isinstance(outcome, Solution) else getattr(outcome, "partial", None)
        if not isinstance(solution, Solution):
            return
        if isinstance(outcome, Solution):
            self._observe("time_to_first_text_seconds", job.first_text_s or seconds)
        tokens = solution.tokens
        for kind in ("generated", "kept", "overrun", "speculated", "speculated_kept"):
            self._tokens.labels(kind).inc(getattr(tokens, kind))
        self._tokens.labels("verifier").inc(tokens.verifier_prefilled + tokens.verifier_generated)
        self._observe("goodput_tokens_per_second", solution.goodput_tok_s)
        self._observe("verifier_steps_per_call", solution.batch.verifier_steps_mean)

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)

    # --- who reads ---------------------------------------------------------------------------

    def routes(self) -> APIRouter:
        """`GET /metrics`."""
        routes = APIRouter()

        @routes.get("/metrics")
        def metrics() -> Response:
            return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

        return routes

    def gauges(self) -> list[dict[str, Any]]:
        """What the page shows of this moment, see `feed.Gauges`."""
        used, states = self._queue.solver.usage(), self._states()
        gauges: list[dict[str, Any]] = [
            {"name": "searches", "value": states["running"]},
            {"name": "waiting", "value": states.total() - states["running"]},
            {"name": "tokens", "total": used.engine.row_tokens, "unit": "tokens"},
        ]
        for (model, tier), level in used.levels.items():
            if tier == "device" or level.used_bytes:
                name = f"{model}'s KV" + ("" if tier == "device" else f" on the {tier}")
                held = {"value": level.used_bytes, "of": level.budget_bytes}
                gauges.append({"name": name, "unit": "bytes", **held})
        for (direction,), moved in _link_bytes(used).items():
            gauges.append({"name": f"link, {direction}", "total": moved, "unit": "bytes"})
        return gauges

    def collect(self) -> Iterable[Metric]:
        """All families that are of this moment. With replicas they are of all of them together,
        and of each."""
        states, engine = self._states(), self._queue.solver
        requests = {(state,): states[state] for state in ("running", "waiting")}
        families = _of_usage(engine.usage())
        families.append((GAUGE, "requests_now", "Searches that run or wait.", "state", requests))
        if not isinstance(engine, Solver):
            families += _of_replicas(engine)
        for kind, name, said, labels, samples in families:
            family = kind(f"beamwright_{name}", said, labels=labels.split())
            for values, value in samples.items():
                family.add_metric(values, value)
            yield family

    def _states(self) -> CountOf[str]:
        return CountOf(job.state for job in list(self._queue.jobs.values()))


Family = tuple[Any, str, str, str, Mapping[Any, float]]
"""Kind, name, help, names of labels, and the samples by the values of these."""

GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily


def _link_bytes(used: Usage) -> dict[tuple[str], int]:
    """That crossed the link, where there is one."""
    moved = {("h2d",): used.engine.h2d_bytes, ("d2h",): used.engine.d2h_bytes}
    return moved if used.has_link else {}


def _of_usage(used: Usage) -> list[Family]:
    engine = used.engine
    held = {key: level.used_bytes for key, level in used.levels.items()}
    budgets = {key: level.budget_bytes for key, level in used.levels.items()}
    cached, waits = {}, {}
    for model, counted in used.counters.items():
        if model != "engine":
            waits[model,] = counted.transfer_wait_s
            cached[model, "needed"] = counted.needed_tokens
            cached[model, "prefilled"] = counted.prefilled_tokens
            cached[model, "loaded"] = counted.loaded_tokens
            cached[model, "recomputed"] = counted.dropped_tokens
    cache = (
        "Tokens of KV that were needed; of these prefilled, loaded, recomputed: others were hit."
    )
    rows = (
        "Tokens of the running batch: of rows that wrote one, and of all that were computed; their "
        "quotient is the generator's occupancy."
    )
    written = {("written",): engine.row_tokens, ("computed",): engine.slot_tokens}
    preempted = "Rows that left in the middle of a step."
    return [
        (GAUGE, "kv_bytes", "KV by tier.", "model tier", held),
        (GAUGE, "kv_budget_bytes", "Most KV that there may be.", "model tier", budgets),
        (COUNTER, "cache_tokens", cache, "model kind", cached),
        (COUNTER, "stall_seconds", "Waiting for transfers of KV.", "model", waits),
        (COUNTER, "link_bytes", "KV that crossed the link.", "direction", _link_bytes(used)),
        (COUNTER, "row_tokens", rows, "kind", written),
        (COUNTER, "iterations", "Of the running batch.", "", {(): engine.iterations}),
        (COUNTER, "preempted", preempted, "", {(): engine.preempted}),
    ]


def _of_replicas(engine: ClusterSolver) -> list[Family]:
    named = {(replica.name,): replica for replica in engine.replicas()}
    searches = {key: replica.searches for key, replica in named.items()}
    queued = {key: replica.tokens for key, replica in named.items()}
    rows = {key: replica.usage.engine.row_tokens for key, replica in named.items()}
    held = {
        (*key, model): level.used_bytes
        for key, replica in named.items()
        for (model, tier), level in replica.usage.levels.items()
        if tier == "device"
    }
    expected = "That its searches are expected to take yet: what routing goes by."
    again = "Begun again because a replica died."
    return [
        (COUNTER, "replica_deaths", "Since it began.", "", {(): engine.deaths}),
        (COUNTER, "searches_restarted", again, "", {(): engine.restarts}),
        (GAUGE, "replicas", "That are there.", "", {(): len(named)}),
        (GAUGE, "replica_searches", "That it was given.", "replica", searches),
        (GAUGE, "replica_queued_tokens", expected, "replica", queued),
        (GAUGE, "replica_kv_bytes", "KV on its device.", "replica model", held),
        (COUNTER, "replica_row_tokens", "Tokens that its rows wrote.", "replica", rows),
    ]


# --- health ----------------------------------------------------------------------------------


def health(engine: Engine) -> dict[str, Any]:
    """That the server is alive; of replicas, each."""
    if isinstance(engine, Solver):
        return {"status": "ok"}
    replicas = [
        {
            "name": replica.name,
            "searches": replica.searches,
            "queued_tokens": replica.tokens,
            "kv_bytes": sum(
                level.used_bytes
                for (_, tier), level in replica.usage.levels.items()
                if tier == "device"
            ),
        }
        for replica in engine.replicas()
    ]
    status = "ok" if len(replicas) >= engine.wanted else "degraded"
    return {"status": status, "replicas_wanted": engine.wanted, "replicas": replicas}


def readiness(queue: RequestQueue) -> dict[str, Any]:
    """Whether it takes searches; where no replica is there who asks all the same waits for one."""
    engine = queue.solver
    status = "draining" if queue.draining else "ready"
    if status == "ready" and not (isinstance(engine, Solver) or engine.replicas()):
        status = "no replica"
    return {"status": status, "searches": len(queue.jobs)}

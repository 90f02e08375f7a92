"""Monitoring of a running server: Prometheus metrics, gauges of the live page, health checks.

`Metrics` listens to the request queue and counts jobs as they begin and end. All other figures are
read from the solver at the time of a request.
"""

from __future__ import annotations

import time
from collections import Counter as CountOf
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import Counter, Histogram
from prometheus_client.registry import Collector

from beamwright.counters import Usage
from beamwright.serve.job import SearchJob
from beamwright.serve.queue import Listener, RequestQueue
from beamwright.solver.solution import Solution

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_RATES = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
_GENERATED = (
    "generated", "kept", "overrun", "speculated", "speculated_kept", "drafted", "draft_accepted",
    "thought",
)  # fmt: skip

# One Prometheus metric family: metric class, name, help text, label names separated by blanks, and
# samples by label values.
Family = tuple[Any, str, str, str, Mapping[Any, float]]

GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily


class Metrics(Collector, Listener):
    """Listener of the request queue that counts its jobs, and source of all metrics.

    registry: this server's Prometheus registry, in place of the process-wide default one.
    """

    def __init__(self, queue: RequestQueue) -> None:
        self.registry = CollectorRegistry()
        self._queue = queue
        self.registry.register(self)
        named: dict[str, Any] = {"registry": self.registry, "namespace": "beamwright"}
        self._requests = Counter("requests", "Ended searches by outcome.", ["outcome"], **named)
        self._scores = Counter("scores", "Ended score requests by outcome.", ["outcome"], **named)
        kinds = (
            "Tokens. Parts of generated: kept, overrun, thought, speculated, speculated_kept. "
            "Part of drafted: draft_accepted. verifier: tokens that the verifier read or wrote."
        )
        self._tokens = Counter("tokens", kinds, ["kind"], **named)
        seconds, rates = {**named, "buckets": _SECONDS}, {**named, "buckets": _RATES}
        said = "Seconds from a request to its first final text."
        self._first_text = Histogram("time_to_first_text_seconds", said, **seconds)
        self._search = Histogram("search_seconds", "Seconds from a request to its end.", **seconds)
        said = "Goodput of a search, as FlashTTS defines it."
        self._goodput = Histogram("goodput_tokens_per_second", said, **rates)

    # --- a listener of the queue -------------------------------------------------------------

    def on_begun(self, job: SearchJob) -> None:
        """Count the prompt tokens of a job that was submitted."""
        self._tokens.labels("prompt").inc(job.prompt_tokens)

    def on_ended(self, job: SearchJob, outcome: Solution | BaseException) -> None:
        """Count a job's outcome, its seconds and its tokens."""
        searches, seconds = job.paths is None, time.monotonic() - job.began_s
        (self._requests if searches else self._scores).labels(job.state).inc()
        if searches:
            self._search.observe(seconds)
        solution = outcome if isinstance(outcome, Solution) else getattr(outcome, "partial", None)
        if not isinstance(solution, Solution):
            return
        if isinstance(outcome, Solution) and searches:
            self._first_text.observe(job.first_text_s or seconds)
        tokens = solution.tokens
        for kind in _GENERATED:
            self._tokens.labels(kind).inc(getattr(tokens, kind))
        self._tokens.labels("verifier").inc(tokens.verifier_prefilled + tokens.verifier_generated)
        if solution.goodput_tok_s is not None:
            self._goodput.observe(solution.goodput_tok_s)

    # --- output ------------------------------------------------------------------------------

    def text(self) -> bytes:
        """Render all metrics in Prometheus's format."""
        return generate_latest(self.registry)

    def gauges(self) -> list[dict[str, Any]]:
        """Return the current figures for the live page, in the format of `feed.Gauges`."""
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
        """Yield the metric families of the current state, summed over any replicas.

        Prometheus's registry calls this method for every scrape.
        """
        states, engine = self._states(), self._queue.solver
        requests = {(state,): states[state] for state in ("running", "waiting")}
        families = _of_usage(engine.usage())
        families.append((GAUGE, "requests_now", "Searches by state.", "state", requests))
        if engine.roster is not None:
            replicas = engine.roster.replicas()
            loads = {(replica.name,): replica.candidates for replica in replicas}
            said = "Candidates of the searches on each replica. Routing uses this load."
            families += [
                (
                    COUNTER,
                    "replica_deaths",
                    "Dead replicas since start.",
                    "",
                    {(): engine.roster.deaths},
                ),
                (GAUGE, "replicas", "Replicas in service.", "", {(): len(replicas)}),
                (GAUGE, "replica_candidates", said, "replica", loads),
            ]
        for kind, name, said, labels, samples in families:
            family = kind(f"beamwright_{name}", said, labels=labels.split())
            for values, value in samples.items():
                family.add_metric(values, value)
            yield family

    def _states(self) -> CountOf[str]:
        return CountOf(job.state for job in list(self._queue.jobs.values()))


def _link_bytes(used: Usage) -> dict[tuple[str], int]:
    """Return the bytes copied between host and device, by direction; {} if there is no link."""
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
    cache = "KV tokens needed, and of these prefilled, loaded and recomputed. The rest were hits."
    rows = "Tokens that rows wrote, and tokens computed for all slots of the batch."
    written = {
        ("written",): engine.row_tokens,
        ("computed",): engine.slot_tokens,
    }
    return [
        (GAUGE, "kv_bytes", "Bytes of KV by tier.", "model tier", held),
        (GAUGE, "kv_budget_bytes", "Budget for KV in bytes.", "model tier", budgets),
        (COUNTER, "cache_tokens", cache, "model kind", cached),
        (COUNTER, "stall_seconds", "Seconds of waiting for KV transfers.", "model", waits),
        (COUNTER, "link_bytes", "KV bytes over the link.", "direction", _link_bytes(used)),
        (COUNTER, "row_tokens", rows, "kind", written),
    ]


def health(queue: RequestQueue) -> dict[str, Any]:
    """Return the server's status and its number of searches.

    The status is "ok", "degraded" or "draining". With replicas, the result also has their names and
    the wanted number. If a remote generator does not answer, the result has the reason.
    """
    engine, status, more = queue.solver, "ok", dict[str, Any]()
    if engine.remote is not None and (fault := engine.remote.find_fault()):
        status, more = "degraded", {"generator": fault}
    if engine.roster is not None:
        names, wanted = [each.name for each in engine.roster.replicas()], engine.roster.wanted
        status = "ok" if len(names) >= wanted else "degraded"
        more = {"replicas_wanted": wanted, "replicas": names}
    status = "draining" if queue.draining else status
    return {"status": status, "searches": len(queue.jobs), **more}

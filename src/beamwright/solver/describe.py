"""From a search that has ended, or was stopped, to its Solution: what was measured, in text.

Knows differences of counters, the final candidates of a tree and what makes them doubtful.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from beamwright.config import Settings
from beamwright.counters import Counters
from beamwright.engine.decisions import cut_short, num_generated, policy_name
from beamwright.engine.moving import MovingSplit
from beamwright.engine.timeline import Accounting
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import BeamwrightError, Cancelled, Interrupted
from beamwright.plan.workload import dm_lower_bound_bytes
from beamwright.protocols import SchedulePolicy
from beamwright.search import strategy_row
from beamwright.search.answers import extract_answer
from beamwright.search.choose import choose
from beamwright.search.doubts import (
    doubts_about_answers,
    doubts_about_problem,
    doubts_about_scores,
    doubts_about_trust,
)
from beamwright.search.revise import asked_again, best_answer
from beamwright.search.rounds import ranked
from beamwright.solver.machinery import Machinery
from beamwright.solver.solution import (
    BatchStats,
    CacheReport,
    CacheStats,
    Candidate,
    KVStats,
    MemoryStats,
    RemoteStats,
    Solution,
    SparseStats,
    SpeculationStats,
    TimeStats,
    TokenCounts,
    TreeStats,
)
from beamwright.tree import COMPLETE_STOPS, Node, NodeState, SearchTree, tree_hash

_ROUND_LIMIT = "round_limit"
_TRUNCATED = (
    "--speculation truncate: steps begin with a part of their siblings' tokens, as many as there "
    "was time for; another run gives another tree"
)
_TOKENISED_HERE = (
    "the generator does not say which tokens it drew: its texts are tokenised here, so counts of "
    "tokens may differ from its own"
)
_SEARCHES = (
    "each text of the generator is the answer of a whole search at its server: take NAME:plain, "
    "its model alone, for a search of this one's own"
)


# --- what is measured ------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """All counters at a moment, see `Machinery.counted`."""

    time_s: float
    counted: Mapping[str, Counters]


@dataclass(frozen=True)
class Measured:
    """What was measured while a tree was in flight; bytes and counts are of all that ran beside it.

    spent: phases and groups, those of earlier processes included. total_generated: tokens.
    graphs_failed: why steps were not captured.
    """

    settings: Settings
    spent: Counters
    total_s: float
    total_generated: int
    kv: KVStats
    memory: MemoryStats
    cache: CacheReport
    sparse: SparseStats | None
    batch: BatchStats
    remote: RemoteStats | None
    exact: bool
    schedule: str
    attention: str | None
    graphs_failed: str | None


class Meter:
    """Measures what happens while a tree is in flight, as the difference of two counts.

    moving: what moves memory between both models now.
    """

    def __init__(
        self, machinery: Machinery, schedule: SchedulePolicy, accounting: Accounting
    ) -> None:
        self._machinery, self._schedule, self.accounting = machinery, schedule, accounting
        self.moving: MovingSplit | None = None
        self._begun = self.mark()

    def mark(self) -> Mark:
        """Where all counters are."""
        return Mark(time.perf_counter(), self._machinery.counted())

    def spent(self, since: Mark, before: Counters | None = None) -> Counters:
        """Phases and groups since then, and `before`."""
        return self.accounting.now() - since.counted["engine"] + (before or Counters())

    def measured(
        self, run: TreeRun, settings: Settings, since: Mark, before: Counters | None
    ) -> Measured:
        """What was measured since a tree was admitted. before: by earlier processes."""
        machinery, generator = self._machinery, self._machinery.generator
        spent, now = self.spent(since, before), self.mark()
        new = {name: counted - since.counted[name] for name, counted in now.counted.items()}
        rule, remote = machinery.rule, machinery.remote
        mixed = rule is not None and before is not None  # a resumed path has KV of full attention
        exact = machinery.exact and settings.schedule.speculation != "truncate" and not mixed
        kept = {
            name: CacheStats.of(new[name])
            for name, model in machinery.models.items()
            if not model.store.streams_layers
        }
        return Measured(
            settings=settings,
            spent=spent,
            total_s=now.time_s - since.time_s + run.elapsed_s,
            total_generated=max(num_generated(run.tree), new["engine"].row_tokens),
            kv=self._kv(run, settings, spent, new["engine"], now),
            memory=self._memory(settings),
            cache=CacheReport(kept.get("generator"), kept.get("verifier")),
            sparse=None if rule is None else SparseStats.of(rule.method, new["generator"]),
            batch=BatchStats.of(settings.schedule.max_batch, new["engine"]),
            remote=None
            if remote is None
            else RemoteStats.of(remote.token_ids, remote.source.facts.searches, new["engine"]),
            exact=exact and generator is not None,
            schedule=policy_name(self._schedule),
            attention=None if generator is None else generator.backend.name,
            graphs_failed=machinery.batch.graphs_failed,
        )

    def _kv(
        self, run: TreeRun, settings: Settings, spent: Counters, engine: Counters, now: Mark
    ) -> KVStats:
        machinery, models = self._machinery, self._machinery.models
        if machinery.generator is None:
            return KVStats()
        token_bytes = machinery.generator.store.pool.layout.bytes_per_token
        budget_bytes = machinery.plan.generator_kv_bytes
        if self.moving is not None:
            budget_bytes = self.moving.most_generator_bytes
        recomputed = (
            now.counted[name].recomputed_tokens - self._begun.counted[name].recomputed_tokens
            for name in models
        )
        stores = [model.store for model in models.values()]
        return KVStats(
            device_budget_bytes=machinery.plan.kv_bytes,
            device_peak_bytes=machinery.device_peak_bytes,
            host_peak_bytes=None
            if machinery.tier is None
            else sum(store.host_peak_bytes for store in stores),
            h2d_bytes=engine.h2d_bytes,
            d2h_bytes=engine.d2h_bytes,
            groups=spent.groups,
            dm_lower_bound_bytes=dm_lower_bound_bytes(
                (tokens * token_bytes for tokens in run.round_tokens), budget_bytes
            ),
            scratch_peak_bytes=sum(store.scratch.peak_bytes for store in stores),
            recomputed_tokens=sum(recomputed),
            link_bandwidth_emulated=settings.schedule.link_bandwidth,
        )

    def _memory(self, settings: Settings) -> MemoryStats:
        plan, moving = self._machinery.plan, self.moving
        if self._machinery.generator is None:
            return MemoryStats(None, None, plan.verifier_kv_bytes, 0, 0)
        split = settings.memory.split
        if moving is None:
            return MemoryStats(split, plan.generator_kv_bytes, plan.verifier_kv_bytes, 0, 0)
        counts, parts = moving.counts, (moving.generator_bytes, moving.verifier_bytes)
        return MemoryStats(split, *parts, counts.moves, counts.moved_bytes)


# --- how a search has ended -------------------------------------------------------------------


def final_nodes(tree: SearchTree, n: int | None = None) -> list[Node]:
    """Final candidates, each kind in lineage order: finished ones, then those cut off by a limit,
    the best-scored of these if there are more than n in all.

    Where a deadline struck in the middle of a round, paths that did not get their turn end a
    step earlier. Of a path that was asked again, its best answer stands.
    """
    finished, unfinished = tree.finished(), [*tree.candidates(), *cut_short(tree)]
    if n is not None:
        best = ranked(unfinished)[: max(0, n - len(finished))]
        unfinished = [leaf for leaf in unfinished if leaf in best]
    return [best_answer(leaf) for leaf in [*finished, *unfinished][:n]]


def complete_nodes(tree: SearchTree) -> list[Node]:
    """Candidates that stand wherever a search is broken off: finished paths, and answers that
    were asked about again."""
    unfinished = [leaf for leaf in (*tree.candidates(), *cut_short(tree)) if asked_again(leaf)]
    return [best_answer(leaf) for leaf in (*tree.finished(), *unfinished)]


def with_partial(
    error: BeamwrightError | KeyboardInterrupt, ended: Sequence[tuple[TreeRun, Measured]]
) -> BeamwrightError | Interrupted:
    """The error to raise for one that stopped a search, with what was finished before it.

    Where its user has stopped it, unfinished paths stand where none is finished.
    """
    stopped = error if isinstance(error, BeamwrightError) else Interrupted()
    if len(ended) == 1:
        ((run, measured),) = ended
        run.tree.reason_fewer = str(error) or "interrupted"
        nodes = complete_nodes(run.tree)
        if not nodes and isinstance(stopped, Interrupted | Cancelled):
            nodes = final_nodes(run.tree, measured.settings.search.n)
        stopped.partial = _describe(run, measured, nodes) if nodes else None
    return stopped


def describe(run: TreeRun, measured: Measured) -> Solution:
    """The solution of one finished tree."""
    search = measured.settings.search
    nodes = final_nodes(run.tree, search.n)
    finals = strategy_row(search).finals
    if finals is not None:
        nodes = finals(run.tree.finished(), search.n) or nodes
    return _describe(run, measured, nodes)


def _describe(run: TreeRun, measured: Measured, nodes: list[Node]) -> Solution:
    tree = run.tree
    candidates = tuple(_candidate(node) for node in nodes)
    decoded = [
        node
        for node in tree.nodes()
        if node.parent is not None and node.turn is None and node.state is not NodeState.OPEN
    ]
    chosen = choose(
        [c.answer for c in candidates],
        [c.score for c in candidates],
        [c.stop in COMPLETE_STOPS for c in candidates],
        measured.settings.search.choose or "best",
    )
    usage = _tokens(tree, decoded, measured.remote)
    return Solution(
        problem_id=tree.root.problem_id,
        problem=tree.root.problem_text,
        answer=candidates[chosen].answer,
        text=candidates[chosen].text,
        score=candidates[chosen].score,
        stop=candidates[chosen].stop,
        lineage=candidates[chosen].lineage,
        rounds=tree.rounds,
        reason_fewer=tree.reason_fewer,
        warnings=_warnings(tree, candidates, candidates[chosen], measured),
        last_step=_last_step(nodes[chosen]) if candidates[chosen].answer is None else None,
        candidates=candidates,
        tree_stats=TreeStats(
            nodes=len(decoded),
            pruned=sum(node.state is NodeState.PRUNED for node in decoded),
            unique_tokens=sum(len(node.token_ids) for node in decoded),
            path_tokens=sum(candidate.tokens for candidate in candidates),
        ),
        tokens=usage,
        kv=measured.kv,
        cache=measured.cache,
        sparse=measured.sparse,
        memory=measured.memory,
        batch=measured.batch,
        remote=measured.remote,
        speculation=SpeculationStats(
            mode=measured.settings.schedule.speculation,
            rows=measured.spent.speculative_rows,
            tokens=usage.speculated,
            kept=usage.speculated_kept,
            kept_share=usage.speculated_kept / usage.speculated if usage.speculated else None,
        ),
        time=_time(measured, usage.generated),
        io_share=measured.spent.stall_s / measured.total_s if measured.total_s else 0.0,
        goodput_tok_s=run.goodput_tok_s(nodes, best_answer),
        tree_hash=tree_hash(tree),
        exact=measured.exact,
        seed=measured.settings.search.seed,
        schedule=measured.schedule,
        attention=measured.attention,
        settings=measured.settings,
        tree=tree,
    )


def _warnings(
    tree: SearchTree, candidates: Sequence[Candidate], chosen: Candidate, measured: Measured
) -> tuple[str, ...]:
    scores = [candidate.score for candidate in candidates]
    found = doubts_about_problem(tree.root.problem_text, measured.settings)
    found += doubts_about_scores(tree, measured.settings)
    found = found or doubts_about_trust(scores, measured.settings)
    if chosen.answer is None and tree.root.problem_text:  # a synthetic prompt asks nothing
        answers = [candidate.answer for candidate in candidates]
        stops = [candidate.stop for candidate in candidates]
        found += doubts_about_answers(answers, stops, measured.settings)
    if measured.settings.schedule.speculation == "truncate":
        found += [_TRUNCATED]
    if measured.remote is not None and not measured.remote.token_ids:
        found += [_TOKENISED_HERE]
    if measured.remote is not None and measured.remote.searches:
        found += [_SEARCHES]
    if measured.graphs_failed is not None:
        found += [f"graphs: failed: {measured.graphs_failed}; steps run as plain calls"]
    return tuple(found)


def _last_step(node: Node) -> str | None:
    """Text of the path's last step that holds any."""
    steps = (step.step_text.strip() for step in reversed(node.reply()))
    return next((text for text in steps if text), None)


def _candidate(node: Node) -> Candidate:
    reply = node.reply()
    asked_again = any(child.turn is not None for child in node.children)
    stop = str(node.stop) if node.state is NodeState.FINISHED or asked_again else _ROUND_LIMIT
    return Candidate(
        answer=extract_answer(node.text),
        text=node.text,
        score=node.score,
        stop=stop,
        tokens=node.num_path_tokens,
        lineage=node.lineage,
        step_scores=tuple(step.step_score for step in reply),
        notes=next((step.notes for step in reversed(reply) if step.notes), {}),
    )


def _tokens(tree: SearchTree, decoded: Sequence[Node], remote: RemoteStats | None) -> TokenCounts:
    usage: Counter[str] = Counter()
    for node in tree.nodes():
        usage.update(dict(node.usage))  # a worker may be writing to it still
    return TokenCounts(
        generated=sum(len(node.token_ids) for node in decoded),
        kept=sum(len(n.token_ids) for n in decoded if n.state is not NodeState.PRUNED),
        overrun=usage["overrun"],
        speculated=usage["speculated"],
        speculated_kept=usage["speculated_kept"],
        generator_prefilled=usage["generator_prefilled"] if remote is None else remote.prefilled,
        generator_reused=usage["generator_reused"] if remote is None else remote.cached_tokens,
        verifier_prefilled=usage["verifier_prefilled"],
        verifier_reused=usage["verifier_reused"],
        verifier_generated=usage["verifier_generated"],
    )


def _time(measured: Measured, generated: int) -> TimeStats:
    """A tree's share of the run, by the tokens it generated: shares add up to the wall time."""
    share = generated / measured.total_generated if measured.total_generated else 1.0
    phases = {name: seconds * share for name, seconds in measured.spent.seconds.items()}
    total_s = measured.total_s * share
    return TimeStats(
        total_s=total_s,
        decode_s=phases.get("decode", 0.0),
        verify_s=phases.get("verify", 0.0),
        both_s=phases.get("both", 0.0),
        schedule_s=phases.get("schedule", 0.0),
        stall_s=phases.get("stall", 0.0),
        other_s=max(0.0, total_s - sum(phases.values())),
    )

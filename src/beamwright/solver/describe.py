"""From a search that has ended, or was stopped, to its Solution. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from beamwright.engine.limits import cut_short
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import BeamwrightError, Cancelled, Interrupted
from beamwright.plan.workload import dm_lower_bound_bytes
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
from beamwright.solver.facts import RunFacts
from beamwright.solver.solution import (
    Candidate,
    KVStats,
    RemoteStats,
    Solution,
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


def describe_finished(run: TreeRun, facts: RunFacts, reason: str) -> Solution | None:
    """What a search that was stopped has finished; None if that is no candidate."""
    nodes = complete_nodes(run.tree)
    run.tree.reason_fewer = reason
    return _describe(run, facts, nodes) if nodes else None


def describe_best(run: TreeRun, facts: RunFacts, reason: str) -> Solution | None:
    """The same for a search that its user has stopped; unfinished paths where none is finished."""
    found = describe_finished(run, facts, reason)
    nodes = final_nodes(run.tree, facts.settings.search.n)
    return found or (_describe(run, facts, nodes) if nodes else None)


def with_partial(
    error: BeamwrightError | KeyboardInterrupt, found: Sequence[tuple[TreeRun, RunFacts]]
) -> BeamwrightError | Interrupted:
    """The error to raise for one that stopped a search, with what was finished before it."""
    stopped = error if isinstance(error, BeamwrightError) else Interrupted()
    if len(found) == 1:
        describe = (
            describe_best if isinstance(stopped, Interrupted | Cancelled) else describe_finished
        )
        stopped.partial = describe(*found[0], str(error) or "interrupted")
    return stopped


def describe(run: TreeRun, facts: RunFacts) -> Solution:
    """The solution of one finished tree."""
    search = facts.settings.search
    nodes = final_nodes(run.tree, search.n)
    finals = strategy_row(search).finals
    if finals is not None:
        nodes = finals(run.tree.finished(), search.n) or nodes
    return _describe(run, facts, nodes)


def _describe(run: TreeRun, facts: RunFacts, nodes: list[Node]) -> Solution:
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
        facts.settings.search.choose or "best",
    )
    usage = _tokens(tree, decoded, facts.remote)
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
        warnings=_warnings(tree, candidates, candidates[chosen], facts),
        last_step=_last_step(nodes[chosen]) if candidates[chosen].answer is None else None,
        candidates=candidates,
        tree_stats=TreeStats(
            nodes=len(decoded),
            pruned=sum(node.state is NodeState.PRUNED for node in decoded),
            unique_tokens=sum(len(node.token_ids) for node in decoded),
            path_tokens=sum(candidate.tokens for candidate in candidates),
        ),
        tokens=usage,
        kv=_kv(run, facts),
        cache=facts.cache,
        sparse=facts.sparse,
        memory=facts.memory,
        batch=facts.batch,
        remote=facts.remote,
        speculation=SpeculationStats(
            mode=facts.settings.schedule.speculation,
            rows=facts.counted.speculative_rows,
            tokens=usage.speculated,
            kept=usage.speculated_kept,
            kept_share=usage.speculated_kept / usage.speculated if usage.speculated else None,
        ),
        time=_time(facts, usage.generated),
        io_share=facts.counted.stall_s / facts.total_s if facts.total_s else 0.0,
        goodput_tok_s=run.goodput_tok_s(nodes, best_answer),
        tree_hash=tree_hash(tree),
        exact=facts.exact,
        seed=facts.settings.search.seed,
        schedule=facts.schedule,
        attention=facts.attention,
        settings=facts.settings,
        tree=tree,
    )


def _kv(run: TreeRun, facts: RunFacts) -> KVStats:
    kv = facts.kv
    if kv is None:
        return KVStats()
    return KVStats(
        device_budget_bytes=kv.device_budget,
        device_peak_bytes=kv.device_peak,
        host_peak_bytes=kv.host_peak,
        h2d_bytes=kv.h2d,
        d2h_bytes=kv.d2h,
        groups=facts.counted.groups,
        dm_lower_bound_bytes=dm_lower_bound_bytes(
            (tokens * kv.per_token for tokens in run.round_tokens), kv.generator_budget
        ),
        scratch_peak_bytes=kv.scratch_peak,
        recomputed_tokens=kv.recomputed_tokens,
        link_bandwidth_emulated=facts.settings.schedule.link_bandwidth,
    )


def _warnings(
    tree: SearchTree, candidates: Sequence[Candidate], chosen: Candidate, facts: RunFacts
) -> tuple[str, ...]:
    scores = [candidate.score for candidate in candidates]
    found = doubts_about_problem(tree.root.problem_text, facts.settings)
    found += doubts_about_scores(tree, facts.settings)
    found = found or doubts_about_trust(scores, facts.settings)
    if chosen.answer is None and tree.root.problem_text:  # a synthetic prompt asks nothing
        answers = [candidate.answer for candidate in candidates]
        stops = [candidate.stop for candidate in candidates]
        found += doubts_about_answers(answers, stops, facts.settings)
    if facts.settings.schedule.speculation == "truncate":
        found += [_TRUNCATED]
    if facts.remote is not None and not facts.remote.token_ids:
        found += [_TOKENISED_HERE]
    if facts.remote is not None and facts.remote.searches:
        found += [_SEARCHES]
    if facts.graphs_failed is not None:
        found += [f"graphs: failed: {facts.graphs_failed}; steps run as plain calls"]
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


def _time(facts: RunFacts, generated: int) -> TimeStats:
    """A tree's share of the run, by the tokens it generated: shares add up to the wall time."""
    share = generated / facts.total_generated if facts.total_generated else 1.0
    phases = {name: seconds * share for name, seconds in facts.counted.seconds.items()}
    total_s = facts.total_s * share
    return TimeStats(
        total_s=total_s,
        decode_s=phases.get("decode", 0.0),
        verify_s=phases.get("verify", 0.0),
        both_s=phases.get("both", 0.0),
        schedule_s=phases.get("schedule", 0.0),
        stall_s=phases.get("stall", 0.0),
        other_s=max(0.0, total_s - sum(phases.values())),
    )

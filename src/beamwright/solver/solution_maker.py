"""Make the `Solution` of an ended search: final candidates, statistics, warnings and receipt."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from beamwright.config import Settings
from beamwright.counters import PHASES, Counters, ratio_or_none
from beamwright.engine.decisions import policy_name, store_answers, unfinished_paths
from beamwright.engine.split import KVBudgetSplit
from beamwright.engine.timeline import PhaseTimer
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import PolicyError
from beamwright.plan.workload import dm_lower_bound_bytes
from beamwright.protocols import SchedulePolicy
from beamwright.saved import receipt as receipts
from beamwright.search import doubts, strategy_entry
from beamwright.search.choose import choose
from beamwright.search.revise import best_answer_node, has_turn
from beamwright.search.rounds import sort_by_rank
from beamwright.search.synthesis import is_synthesis
from beamwright.solver import solution as result
from beamwright.solver.machinery import Machinery
from beamwright.solver.request import Mark, Request
from beamwright.solver.solution import Candidate, Solution
from beamwright.tree import (
    COMPLETE_STOPS,
    Conversation,
    Node,
    NodeState,
    SearchTree,
    repeated_tokens,
    round_digests,
    tree_hash,
)

_ROUND_LIMIT = "round_limit"
_TRUNCATED = (
    "--speculation truncate: the tree depends on the timing, and another run gives another tree"
)
_TOKENISED_HERE = (
    "the generator returns no token ids: its text is tokenised here, so token counts may differ "
    "from its own"
)


# --- candidates -------------------------------------------------------------------------------


def final_nodes(tree: SearchTree, n: int | None = None) -> list[Node]:
    """Return the last nodes of the final candidates: finished paths, then unfinished ones.

    Both kinds are in lineage order. If there are more than `n` in all, unfinished paths with low
    scores are dropped. If a deadline passed during a round, a path that was not decoded in that
    round ends at its last decoded step. A path with further user turns ends at its best answer.
    """
    finished, unfinished = tree.finished(), [*tree.candidates(), *unfinished_paths(tree)]
    if n is not None:
        best = sort_by_rank(unfinished)[: max(0, n - len(finished))]
        unfinished = [leaf for leaf in unfinished if leaf in best]
    return [best_answer_node(leaf) for leaf in [*finished, *unfinished][:n]]


def complete_nodes(tree: SearchTree) -> list[Node]:
    """Return the last nodes of the candidates that an interrupted search can report.

    These are finished paths, and answers that were followed by a further user turn.
    """
    unfinished = [leaf for leaf in (*tree.candidates(), *unfinished_paths(tree)) if has_turn(leaf)]
    return [best_answer_node(leaf) for leaf in (*tree.finished(), *unfinished)]


def candidate_of(node: Node) -> Candidate:
    """Make the public `Candidate` of a path from its last node."""
    asked = any(child.turn is not None for child in node.children)
    return Candidate(
        answer=node.answer,
        vote=node.vote,
        text=node.text,
        score=node.score,
        stop=str(node.stop) if node.state is NodeState.FINISHED or asked else _ROUND_LIMIT,
        tokens=node.num_path_tokens,
        lineage=node.lineage,
        step_scores=tuple(step.step_score for step in node.reply()),
        notes=node.notes_of_reply,
        said=node.said,
        thought=node.thought_text,
        thought_tokens=sum(len(step.token_ids) for step in node.reply() if step.thought),
    )


# --- statistics ------------------------------------------------------------------------------


class SolutionMaker:
    """Makes the `Solution` of each ended search, with its costs as differences of counters.

    moving: moves KV memory between both models; None if each model's share is fixed.
    """

    def __init__(self, machinery: Machinery, schedule: SchedulePolicy) -> None:
        self._machinery, self._schedule = machinery, schedule
        self.phase_timer = PhaseTimer(counts=machinery.batch.counts)
        self.moving: KVBudgetSplit | None = None

    def read_counters(self) -> Mark:
        """Return the current time and a copy of all counters, to be subtracted at the end."""
        self.phase_timer.now()
        return time.perf_counter(), self._machinery.copy_counters()

    def make_solution(
        self, run: TreeRun, request: Request, nodes: list[Node] | None = None
    ) -> Solution:
        """Make the solution of a request whose search `run` has ended.

        nodes: last nodes of the candidates if the search was interrupted; None if it ended itself.

        Raises:
            PolicyError: if the strategy ended the search without a candidate.
        """
        settings, is_whole, tree = request.problem.settings, nodes is None, run.tree
        search = settings.search
        (began_s, before), (now_s, now) = request.since, self.read_counters()
        written = [node for node in tree.finished() if is_synthesis(node)]
        if nodes is None:
            nodes = final_nodes(tree, search.n + len(written))
            finals = strategy_entry(search).finals
            if finals is not None:
                nodes = finals(tree.finished(), search.n) or nodes
        if not nodes:
            raise PolicyError(f"strategy {search.search} ended the search without a candidate")
        nodes = [*(node for node in nodes if node not in written), *written]
        store_answers(run.answers, nodes)
        candidates = tuple(map(candidate_of, nodes))
        ended = [(each.vote, each.score, each.stop in COMPLETE_STOPS) for each in candidates]
        votes, scores, complete = map(list, zip(*ended, strict=True))
        if written and complete[-1]:
            place = len(nodes) - 1
        else:
            how = "majority" if search.choose == "synthesis" else search.choose
            place = choose(votes, scores, complete, how or "best")
        chosen = candidates[place]
        new = {name: counted - before[name] for name, counted in now.items()}
        recomputed = any(counted.recomputed_tokens for counted in new.values())
        receipt = self._receipt(run, request, is_whole=is_whole, recomputed=recomputed)
        return Solution(
            problem_id=tree.root.problem_id,
            problem=tree.root.problem_text,
            **{name: getattr(chosen, name) for name in result.OF_CHOSEN},
            rounds=tree.rounds,
            reason_fewer=tree.reason_fewer,
            warnings=self._warnings(run, request, candidates, chosen),
            last_step=_last_step(nodes[place]) if chosen.answer is None else None,
            candidates=candidates,
            **self._figures(run, settings, candidates, new, now_s - began_s),
            goodput_tok_s=run.goodput_tok_s(nodes, best_answer_node),
            tree_hash=receipt["tree_hash"],
            exact=receipt["exact"],
            seed=search.seed,
            schedule=policy_name(self._schedule),
            attention=receipt["machine"]["attention"],
            settings=settings,
            receipt=receipt,
            tree=tree,
        )

    def _figures(
        self,
        run: TreeRun,
        settings: Settings,
        candidates: Sequence[Candidate],
        new: Mapping[str, Counters],
        wall_s: float,
    ) -> dict[str, Any]:
        """Return the solution's statistics by field name.

        new: increase of the counters since the request was admitted.
        wall_s: seconds since the request was admitted.
        """
        machinery, engine = self._machinery, new["engine"]
        sparse: result.SparseStats | None = None
        remote: result.RemoteStats | None = None
        steps = [node for node in run.tree.nodes() if node.parent is not None and node.turn is None]
        decoded = [node for node in steps if node.state is not NodeState.OPEN]
        if machinery.rule is not None or machinery.why_sparse is not None:
            named = "off" if machinery.rule is None else machinery.rule.method
            sparse = result.SparseStats.of(new["generator"], method=named, why=machinery.why_sparse)
        if machinery.remote is not None:
            remote = result.RemoteStats.of(engine, token_ids=machinery.remote.token_ids)
        cache = {
            name: result.CacheStats.of(new[name])
            for name, model in machinery.models
            if not model.store.streams_layers
        }
        tokens = _tokens(run.tree, decoded, remote)
        # Trees in flight divide the wall time among them by their numbers of generated tokens.
        # `share` is this tree's part.
        most = max(tokens.generated, engine.row_tokens)
        share = tokens.generated / most if most else 1.0
        total_s = share * (wall_s + run.elapsed_s)
        phases = {f"{name}_s": share * getattr(engine, f"{name}_s") for name in PHASES}
        other_s = max(0.0, total_s - sum(phases.values()))
        return {
            "tree_stats": result.TreeStats(
                nodes=len(decoded),
                pruned=sum(node.state is NodeState.PRUNED for node in decoded),
                unique_tokens=sum(len(node.token_ids) for node in decoded),
                path_tokens=sum(candidate.tokens for candidate in candidates),
            ),
            "tokens": tokens,
            "kv": self._kv(run, settings, new),
            "cache": result.CacheReport(cache.get("generator"), cache.get("verifier")),
            "memory": self._memory(settings),
            "weights": self._weights(new),
            "batch": result.BatchStats.of(engine, slots=settings.schedule.max_batch),
            "sparse": sparse,
            "remote": remote,
            "speculation": result.SpeculationStats.of(
                engine,
                mode=settings.schedule.speculation,
                tokens=tokens.speculated,
                kept=tokens.speculated_kept,
                kept_share=ratio_or_none(tokens.speculated_kept, tokens.speculated),
            ),
            "time": result.TimeStats(total_s=total_s, other_s=other_s, **phases),
            "io_share": phases["stall_s"] / total_s if total_s else 0.0,
        }

    def _receipt(
        self, run: TreeRun, request: Request, *, is_whole: bool, recomputed: bool
    ) -> dict[str, Any]:
        """Return the receipt, from which `verify` can repeat the search, as plain data."""
        machinery, tree, settings = self._machinery, run.tree, request.problem.settings
        generator, device = machinery.generator, settings.model.device
        truncates = settings.schedule.speculation == "truncate"
        exact = (
            machinery.exact
            and generator is not None
            and not truncates
            # A prefill that computes KV again rounds the last bits differently, except in float64.
            and (not recomputed or machinery.dtype == "float64")
            # Resuming recomputes KV by a prefill, which attends to all tokens. Sparse decoding had
            # attended to selected tokens only, so the recomputed KV differs.
            and (machinery.rule is None or run.restore is None)
        )
        decisive = request.problem.tree_settings(machinery.dtype)
        stopped = run.stopped or tree.reason_fewer or "the search was interrupted"
        reasons = (
            (generator is None, f"a server draws the tokens of --model {settings.model.model}"),
            (truncates, "--speculation truncate: the tree depends on the timing"),
            (bool(run.given), "its steps were given, not sampled"),
            (run.ended_by_time or not is_whole, stopped),
        )
        return {
            "format": receipts.FORMAT,
            "tree_hash": tree_hash(tree),
            "rounds": round_digests(tree),
            "problem_id": tree.root.problem_id,
            "problem": receipts.problem_to_json(request.asked),
            "prompt": receipts.prompt_digest(tree.root),
            "settings": receipts.receipt_settings(settings, decisive),
            "exact": exact,
            "recomputed": recomputed,
            "unrepeatable": next((why for holds, why in reasons if holds), None),
            **machinery.identities(),
            "machine": {
                "device": device,
                "processor": receipts.processor_name(device),
                "attention": None if generator is None else generator.backend.name,
                "threads": str(machinery.threads.count),
            },
            "versions": receipts.package_versions(),
        }

    def _kv(self, run: TreeRun, settings: Settings, new: Mapping[str, Counters]) -> result.KVStats:
        """Return the statistics of KV on the device and the host."""
        machinery, plan = self._machinery, self._machinery.plan
        if machinery.generator is None:
            return result.KVStats()
        stores = [model.store for model in machinery.tree_models]
        token_bytes = machinery.generator.store.pool.bytes_per_token
        budget_bytes = plan.generator_kv_bytes
        if self.moving is not None:
            budget_bytes = self.moving.most_generator_bytes
        peak_bytes = sum(store.device_peak_bytes for store in stores)
        if machinery.shared is not None and machinery.moving and machinery.moving.counts.moves:
            peak_bytes = machinery.shared.peak_bytes  # peak of both models together
        return result.KVStats.of(
            new["engine"],
            device_budget_bytes=plan.kv_bytes,
            device_peak_bytes=peak_bytes,
            host_peak_bytes=sum(s.host_peak_bytes for s in stores) if machinery.tiers else None,
            dm_lower_bound_bytes=dm_lower_bound_bytes(
                (tokens * token_bytes for tokens in run.round_tokens), budget_bytes
            ),
            scratch_peak_bytes=sum(store.scratch.peak_bytes for store in stores),
            recomputed_tokens=sum(new[name].recomputed_tokens for name in dict(machinery.models)),
            link_bandwidth_emulated=settings.schedule.link_bandwidth,
        )

    def _memory(self, settings: Settings) -> result.MemoryStats:
        """Return each model's share of the KV memory, and how much memory moved between them."""
        plan, moving = self._machinery.plan, self.moving
        if self._machinery.generator is None:
            return result.MemoryStats(None, None, plan.verifier_kv_bytes, 0, 0)
        shares, moved = (plan.generator_kv_bytes, plan.verifier_kv_bytes), Counters()
        if moving is not None:
            shares, moved = (moving.generator_bytes, moving.verifier_bytes), moving.counts
        return result.MemoryStats(settings.memory.split, *shares, moved.moves, moved.moved_bytes)

    def _weights(self, new: Mapping[str, Counters]) -> dict[str, result.WeightStats]:
        """Return statistics of the models with offloaded layers, by role."""
        sizes = zip(("generator", "verifier"), self._machinery.sizes, strict=False)
        return {
            role: result.WeightStats.of(
                new[role],
                layers=len(model.offloaded.numbers),
                home_bytes=model.offloaded.home_bytes,
                device_bytes=model.weights,
            )
            for role, model in sizes
            if model.offloaded is not None
        }

    def _warnings(
        self, run: TreeRun, request: Request, candidates: Sequence[Candidate], chosen: Candidate
    ) -> tuple[str, ...]:
        """Return the reasons to doubt the result, one line each."""
        machinery, tree, settings = self._machinery, run.tree, request.problem.settings
        lines = doubts.doubts_about_problem(tree.root.problem_text, settings)
        lines += doubts.doubts_about_scores(tree, settings)
        codec, args = machinery.reader.codec, settings.model.template_args
        if isinstance(request.asked, Conversation):
            args = {**args, **request.asked.template_args}
        names = [] if codec is None else codec.unread_args(args)
        unread = f"--template-args: the chat template does not read {', '.join(names)}"
        last = [unread] if names else []
        if run.given:  # no search took place, and the best given path need not be right
            return (*lines, *last)
        scores = [candidate.score for candidate in candidates]
        lines = lines or doubts.doubts_about_low_scores(scores, settings)
        is_open = settings.search.choose == "synthesis"  # the text itself may be the answer
        if chosen.answer is None and tree.root.problem_text and not is_open:
            answers = [candidate.answer for candidate in candidates]
            stops = [candidate.stop for candidate in candidates]
            late = (run.stopped or tree.reason_fewer) if run.ended_by_time else None
            lines += doubts.doubts_about_answers(answers, stops, settings, late)
        votes = [each.vote for each in candidates if each.stop in COMPLETE_STOPS]
        lines += doubts.doubts_about_votes(votes, chosen.vote, settings)
        lines += doubts.doubts_about_sampling([each.text for each in candidates], settings)
        if settings.schedule.speculation == "truncate":
            lines.append(_TRUNCATED)
        lines += doubts.doubts_about_prompts(tree)
        if machinery.remote is not None and not machinery.remote.token_ids:
            lines.append(_TOKENISED_HERE)
        failed = dict.fromkeys(machinery.not_captured)
        lines += [f"CUDA graphs failed: {why}; steps run as plain calls" for why in failed]
        return (*lines, *last)


def _last_step(node: Node) -> str | None:
    """Return the path's last step text that is not empty and not a thought; None without one."""
    steps = (step.step_text.strip() for step in reversed(node.reply()) if not step.thought)
    return next((text for text in steps if text), None)


def _tokens(
    tree: SearchTree, decoded: Sequence[Node], remote: result.RemoteStats | None
) -> result.TokenCounts:
    """Return how many tokens of a tree were generated, reused or discarded."""
    usage: Counter[str] = Counter()
    for node in tree.nodes():
        usage.update(dict(node.usage))  # copy: a worker thread may still write to it
    own: dict[str, Any] = {
        "generated": sum(len(node.token_ids) for node in decoded),
        "kept": sum(len(n.token_ids) for n in decoded if n.state is not NodeState.PRUNED),
        "repeated": repeated_tokens(tree),
        "thought": sum(len(node.token_ids) for node in decoded if node.thought),
    }
    if remote is not None:
        own |= {"generator_prefilled": remote.prefilled, "generator_reused": remote.cached_tokens}
    names = [each.name for each in fields(result.TokenCounts)]
    return result.TokenCounts(**{name: own.get(name, usage[name]) for name in names})

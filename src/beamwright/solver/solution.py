"""What a solved problem is: the public result objects. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from html import escape
from math import inf
from typing import Any

from beamwright.config import Settings
from beamwright.counters import CounterView, figure
from beamwright.page.runs import tree_page
from beamwright.tree import Lineage, SearchTree

OF_CHOSEN = ("answer", "text", "score", "stop", "lineage")
"""What a solution says of the candidate whose answer it is."""
_SHOWN = 5  # candidates, in a notebook
_LIGHT = 300_000
"""Characters of a page that a notebook may keep for each solution it shows."""


@dataclass(frozen=True)
class Candidate:
    """A final candidate; tokens are counted after the prompt.

    vote: one text for equal answers; None without an answer.
    text: the whole reply; said: of it what answers, thought: what was thought before, which has
    thought_tokens.
    lineage: of its last step; `solution.tree.node(lineage)` is that step, and its `path()` all.
    step_scores: the verifier's score of each step of the text, in order; None where it has none.
    notes: what the verifier wrote about it last, by kind; empty where it writes nothing.
    """

    answer: str | None
    vote: str | None
    text: str
    score: float | None
    stop: str
    tokens: int
    lineage: Lineage
    step_scores: tuple[float | None, ...]
    notes: Mapping[str, str]
    said: str
    thought: str
    thought_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Its part of the object that `solve --json` prints; notes and thoughts only where there
        are any."""
        absent: tuple[str, ...] = () if self.notes else ("notes",)
        absent += () if self.thought_tokens else ("said", "thought", "thought_tokens")
        return {name: value for name, value in asdict(self).items() if name not in absent}


@dataclass(frozen=True)
class TreeStats:
    """nodes: decoded steps; unique_tokens: their tokens; path_tokens: summed over candidates."""

    nodes: int
    pruned: int
    unique_tokens: int
    path_tokens: int


@dataclass(frozen=True)
class TokenCounts:
    """Every token that was computed, reused or thrown away; null where a generator elsewhere does
    not say.

    repeated: of those generated, see `tree.repeated_tokens`; thought: of steps of thoughts.
    drafted: that were guessed, and forwarded beside rows' own; draft_accepted: of them, those that
    the row drew.
    """

    generated: int
    kept: int
    repeated: int
    thought: int
    overrun: int
    speculated: int
    speculated_kept: int
    drafted: int
    draft_accepted: int
    generator_prefilled: int | None
    generator_reused: int | None
    verifier_prefilled: int
    verifier_reused: int
    verifier_generated: int


@dataclass(frozen=True, kw_only=True)
class KVStats(CounterView):
    """KV on both tiers, and what crossed the link; host figures are null where there is one tier.

    Of generator and verifier, and of all problems that were in flight together, not divided. All
    null where the generator runs elsewhere.

    scratch_peak_bytes: attention's working copies of a group, beside the budget.
    """

    device_budget_bytes: int | None = None
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    groups: int | None = None
    dm_lower_bound_bytes: int | None = None
    scratch_peak_bytes: int | None = None
    recomputed_tokens: int | None = None
    link_bandwidth_emulated: int | None = None


@dataclass(frozen=True)
class MemoryStats:
    """How generator and verifier share the memory for KV on the device.

    split: as it was asked for. generator_kv_bytes, verifier_kv_bytes: when the search ended, or
    for all of it where nothing moves; null where the generator runs elsewhere. moves, moved_bytes:
    memory that went from one to the other.
    """

    split: str | float | None
    generator_kv_bytes: int | None
    verifier_kv_bytes: int
    moves: int
    moved_bytes: int


@dataclass(frozen=True, kw_only=True)
class CacheStats(CounterView):
    """How KV that was needed was found, of one model (`Counters`).

    A row that joins the running batch needs all of its path; a prefill the path before it and its
    own tokens, the prefilled ones. hit_rate: reused_tokens / needed_tokens, None where nothing was
    needed. reused_tokens: of those needed, on the device ever since they were written or needed
    last. What had left it since had to be loaded or recomputed, whether it was fetched ahead or
    waited for.
    """

    hit_rate: float | None = figure("reused_tokens", per="needed_tokens")
    needed_tokens: int
    reused_tokens: int
    loaded_tokens: int
    recomputed_tokens: int = figure("dropped_tokens")
    prefilled_tokens: int
    evicted_blocks: int
    loaded_blocks: int
    recomputed_blocks: int


@dataclass(frozen=True)
class CacheReport:
    """How often KV was where it was needed, of each model.

    Of all problems that were in flight together. None where a model keeps no KV, and for layer-wise
    offloading, which fetches layers for every token.
    """

    generator: CacheStats | None
    verifier: CacheStats | None


@dataclass(frozen=True, kw_only=True)
class BatchStats(CounterView):
    """The generator's running batch while the problem was in flight, others beside it included.

    slots: most rows at a time; None for as many as fit. iterations: of at most 16 tokens.
    passes: forward passes in them. rows_mean: rows that wrote a token, per forward pass. occupancy:
    the same per row that was computed, padding and rows that had ended included. admitted: rows
    that joined. preempted: that had to leave in the middle of their step; parking_plans: plans that
    count on it (`--batching`).
    verifier_calls, verifier_steps_mean: turns of the verifier, and the steps in one.
    """

    slots: int | None
    iterations: int
    passes: int = figure("steps")
    rows_mean: float | None = figure("row_tokens", per="steps")
    occupancy: float | None = figure("row_tokens", per="slot_tokens")
    admitted: int
    preempted: int
    parking_plans: int
    verifier_calls: int
    verifier_steps_mean: float | None = figure("scored_steps", per="verifier_calls")


@dataclass(frozen=True, kw_only=True)
class SparseStats(CounterView):
    """`--sparse`: what decoding has read, of all problems that were in flight together.

    tokens: that were decoded by rows which select. visible_mean, selected_mean: tokens that these
    saw, and read. left_out_mean: of the attention of a head, what was not read; where scores are of
    pages at most so much; None where the scores do not say. corrections: see `--sparse-correct`.
    why: `auto` stands for this method.
    """

    method: str
    tokens: int = figure("sparse_tokens")
    visible_mean: float | None = figure("visible_tokens", per="sparse_tokens")
    selected_mean: float | None = figure("selected_tokens", per="sparse_tokens")
    left_out_mean: float | None = figure("left_out", per="sparse_heads")
    corrections: int
    why: str | None

    def line(self) -> str:
        """For people: the method, what it left unread, and why it is this one."""
        left = self.left_out_mean
        said = "" if left is None else f", {left:.1%} of attention not read"
        return f"--sparse {self.method}{said}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, kw_only=True)
class RemoteStats(CounterView):
    """A generator elsewhere, while the problem was in flight, others beside it included.

    token_ids: it says which tokens it drew; otherwise texts are tokenised here. requests: that it
    had, retries included. prompt_tokens, cached_tokens: that it has read, and of these found in its
    KV, as it says; null where it does not.
    """

    token_ids: bool
    requests: int
    retries: int
    prompt_tokens: int | None = figure("prompt_tokens", unless="untold_prompts")
    cached_tokens: int | None = figure("cached_tokens", unless="untold_cached")

    @property
    def prefilled(self) -> int | None:
        """Prompt tokens that were computed; None: it does not say."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, kw_only=True)
class SpeculationStats(CounterView):
    """What was decoded ahead of selection: rows of all in flight, tokens of this tree.

    kept_share: of its tokens, those in nodes that selection has opened.
    """

    mode: str
    rows: int = figure("speculative_rows")
    tokens: int
    kept: int
    kept_share: float | None


@dataclass(frozen=True)
class TimeStats:
    """Seconds; every instant counted once. both_s: the verifier beside decoding or planning."""

    total_s: float
    decode_s: float
    verify_s: float
    both_s: float
    schedule_s: float
    stall_s: float
    other_s: float


@dataclass(frozen=True)
class Solution:
    """A solved problem: the chosen answer, all candidates, the tree, and the accounting.

    lineage: of the chosen candidate. reason_fewer: why there are fewer candidates than asked for.
    warnings: what makes the result doubtful, a line each. last_step: of the chosen candidate,
    where it states no answer.
    settings: what it was solved with, the strategy's and the verifier's defaults filled in.
    receipt: what the tree follows from, for whoever grows it again (`saved.receipt`).
    tree: every node with its tokens, text, scores and state; it holds no KV any more.
    """

    problem_id: str | int
    problem: str
    answer: str | None
    text: str
    score: float | None
    stop: str | None
    lineage: Lineage
    rounds: int
    reason_fewer: str | None
    warnings: tuple[str, ...]
    last_step: str | None
    candidates: tuple[Candidate, ...]
    tree_stats: TreeStats
    tokens: TokenCounts
    kv: KVStats
    cache: CacheReport
    memory: MemoryStats
    batch: BatchStats
    speculation: SpeculationStats
    sparse: SparseStats | None
    remote: RemoteStats | None
    time: TimeStats
    io_share: float
    goodput_tok_s: float | None
    tree_hash: str
    exact: bool
    seed: int
    schedule: str
    attention: str | None
    settings: Settings
    receipt: Mapping[str, Any] = field(repr=False)
    tree: SearchTree = field(compare=False)

    @property
    def chosen(self) -> Candidate:
        """The candidate whose answer it is."""
        return next(each for each in self.candidates if each.lineage == self.lineage)

    def __repr__(self) -> str:
        took = f"{self.tokens.generated:,} tokens, {self.time.total_s:.2f} s"
        doubts = f", warnings: {len(self.warnings)}" if self.warnings else ""
        score, num = _short(self.score), len(self.candidates)
        return f"<Solution {self.answer!r:.80}, score {score}, {num} candidates, {took}{doubts}>"

    def _repr_html_(self) -> str:
        """For notebooks: answer, score, what makes it doubtful, five candidates, and the tree."""
        stated = self.last_step or self.chosen.said if self.answer is None else self.answer
        doubts = "".join(f"<p>Warning: {escape(line)}</p>" for line in self.warnings)
        rows = [("answer", "score", "ended", "tokens")]

        def rank(each: Candidate) -> tuple[bool, float]:  # the chosen one first, then by score
            return each.lineage != self.lineage, inf if each.score is None else -each.score

        for each in sorted(self.candidates, key=rank)[:_SHOWN]:
            rows.append((each.answer or "-", _short(each.score), each.stop, f"{each.tokens:,}"))
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        table = "".join(f"<tr>{row}</tr>" for row in cells)
        shown = f"{len(rows) - 1} of {len(self.candidates)} candidates"
        return (
            f"<p><b>{escape(stated)}</b> (score {_short(self.score)})</p>{doubts}"
            f"<details open><summary>{shown}</summary><table>{table}</table></details>"
            f"<details><summary>The tree: {self.tree_stats.nodes:,} steps</summary>"
            f"{self._tree_html()}</details>"
        )

    def _tree_html(self) -> str:
        """The page that `--tree` writes, where it is light; else the chosen path."""
        title = self.problem or "synthetic prompt"
        page = tree_page(self.tree, self.tree.node(self.lineage), "search", title)
        if len(page) > _LIGHT:
            return f"<pre>{escape(self.text)}</pre><p>The whole tree is too large to show here.</p>"
        # No origin of its own: what is in it reaches nothing of the notebook's.
        return (
            '<iframe sandbox="allow-scripts allow-downloads" loading="lazy" title="The tree" '
            f'style="width:100%;height:640px;border:0" srcdoc="{escape(page)}"></iframe>'
        )

    def to_json(self) -> dict[str, Any]:
        """The object that `solve --json` prints: everything but the tree's nodes.

        `tree` holds its figures (`tree_stats`).
        """
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in found.items():
            if is_dataclass(value) and not isinstance(value, type):
                found[name] = asdict(value)
        if not self.tokens.thought:
            del found["tokens"]["thought"]
        found["candidates"] = [candidate.to_json() for candidate in self.candidates]
        found["tree"] = found.pop("tree_stats")
        found["settings"] = self.settings.model_dump(mode="json")
        return found


def _short(score: float | None) -> str:
    return "-" if score is None else f"{score:.3g}"

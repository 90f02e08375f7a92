"""The public result objects of a solved problem. They hold data only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from html import escape
from math import inf
from pathlib import Path
from typing import Any

from beamwright.config import Settings
from beamwright.counters import CounterView, counter_field
from beamwright.io import write_atomically
from beamwright.page.runs import tree_page
from beamwright.solver.export import export_steps
from beamwright.tree import Lineage, Node, SearchTree

# Fields of a solution that are copied from the chosen candidate.
OF_CHOSEN = ("answer", "text", "score", "stop", "lineage")
_SHOWN = 5  # maximum number of candidates that a notebook shows
# Maximum number of characters of a tree page that a notebook embeds for a solution.
_MOST_PAGE_CHARACTERS = 300_000


@dataclass(frozen=True)
class Candidate:
    """A final candidate of a search: its answer, text, score and place in the tree."""

    answer: str | None
    vote: str | None  # normalised answer, the same for equal answers; None without an answer
    text: str  # the whole reply, thoughts included
    score: float | None
    stop: str
    tokens: int  # tokens after the prompt
    # Lineage of the candidate's last step, `solution.tree.node(lineage)`. The `path()` of this node
    # has all steps.
    lineage: Lineage
    # The verifier's score of each step, in order; None for a step without a score.
    step_scores: tuple[float | None, ...]
    notes: Mapping[str, str]  # the verifier's latest texts about the candidate, such as a critique
    said: str  # the reply without thoughts
    thought: str  # the text of the reply's thoughts
    thought_tokens: int  # number of tokens of the thoughts

    def to_json(self) -> dict[str, Any]:
        """Return the candidate as in the output of `solve --json`, without empty notes."""
        absent: tuple[str, ...] = () if self.notes else ("notes",)
        absent += () if self.thought_tokens else ("said", "thought", "thought_tokens")
        return {name: value for name, value in asdict(self).items() if name not in absent}


@dataclass(frozen=True)
class TreeStats:
    """Size of the tree."""

    nodes: int  # decoded steps
    pruned: int
    unique_tokens: int  # tokens of all decoded steps
    path_tokens: int  # tokens of the candidates' paths; a token counts once per path that shares it


@dataclass(frozen=True)
class TokenCounts:
    """Tokens that were computed, reused or discarded; None if a server does not report them."""

    generated: int
    kept: int  # generated tokens of steps that were not pruned
    # Generated tokens that repeat those of another path in the same round (`tree.repeated_tokens`).
    repeated: int
    thought: int  # generated tokens of thoughts
    overrun: int  # sampled after the end of a step, and discarded
    speculated: int  # decoded before selection
    speculated_kept: int  # speculated tokens of nodes that selection opened later
    drafted: int  # draft tokens that were verified
    draft_accepted: int  # accepted draft tokens
    generator_prefilled: int | None
    generator_reused: int | None
    verifier_prefilled: int
    verifier_reused: int
    verifier_generated: int


@dataclass(frozen=True, kw_only=True)
class KVStats(CounterView):
    """KV on device and host, and its traffic on the link.

    The numbers cover both models and all problems in flight together. Host numbers are None if all
    KV is on the device. All numbers are None if the generator is remote.

    dm_lower_bound_bytes: lower bound of the bytes that any schedule moves over the link (LBS).
    scratch_peak_bytes: maximum size of attention's working copies, which the KV budget excludes.
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


@dataclass(frozen=True, kw_only=True)
class WeightStats(CounterView):
    """Layers of one model whose weights were not on the device (`--weights-home`).

    layers: number of these layers. home_bytes: their weights on the host or on disk.
    device_bytes: bytes of the other weights, and of the buffers for the copies.
    moved_bytes: bytes copied to the device, for all problems in flight together.
    """

    layers: int
    home_bytes: int
    device_bytes: int
    moved_bytes: int = counter_field("weight_bytes")


@dataclass(frozen=True)
class MemoryStats:
    """How generator and verifier share the device memory for KV.

    split: the value of `--split`.
    generator_kv_bytes, verifier_kv_bytes: the shares at the end of the search. None for a remote
        generator.
    moves, moved_bytes: how often and how much memory moved between the models.
    """

    split: str | float | None
    generator_kv_bytes: int | None
    verifier_kv_bytes: int
    moves: int
    moved_bytes: int


@dataclass(frozen=True, kw_only=True)
class CacheStats(CounterView):
    """How often the KV that a model needed was still on the device.

    A row that joins the running batch needs the KV of its whole path. A prefill needs the KV of the
    path before its new tokens, and computes that of the new ones (`prefilled_tokens`). KV that had
    left the device was loaded or recomputed, and counts as such also if it was prefetched.

    hit_rate: reused_tokens / needed_tokens; None if no KV was needed.
    reused_tokens: needed tokens whose KV has stayed on the device since its last use.
    """

    hit_rate: float | None = counter_field("reused_tokens", per="needed_tokens")
    needed_tokens: int
    reused_tokens: int
    loaded_tokens: int
    recomputed_tokens: int = counter_field("dropped_tokens")
    prefilled_tokens: int
    evicted_blocks: int
    loaded_blocks: int
    recomputed_blocks: int


@dataclass(frozen=True)
class CacheReport:
    """Cache hits of generator and verifier, for all problems in flight together.

    A field is None for a model without KV, and with layer-wise offloading, which loads the KV of
    every layer for each token.
    """

    generator: CacheStats | None
    verifier: CacheStats | None


@dataclass(frozen=True, kw_only=True)
class BatchStats(CounterView):
    """The generator's running batch while the problem was in flight, other problems included."""

    slots: int | None  # maximum number of rows at once; None: as many as fit
    iterations: int  # decode iterations, each of at most 16 tokens per row
    passes: int = counter_field("steps")  # forward passes
    # Rows that sampled a token, per forward pass.
    rows_mean: float | None = counter_field("row_tokens", per="steps")
    # Share of computed rows that sampled a token; padding and ended rows are computed, too.
    occupancy: float | None = counter_field("row_tokens", per="slot_tokens")
    admitted: int  # rows that joined the batch
    preempted: int  # rows that left the batch in the middle of their step
    # Plans in which rows reserve no blocks and are preempted if blocks run out (`--batching`).
    parking_plans: int
    verifier_calls: int  # calls of the verifier
    # Scored steps per call of the verifier.
    verifier_steps_mean: float | None = counter_field("scored_steps", per="verifier_calls")


@dataclass(frozen=True, kw_only=True)
class SparseStats(CounterView):
    """Figures of sparse decoding (`--sparse`), for all problems in flight together.

    tokens: tokens decoded by attention to selected tokens only.
    visible_mean, selected_mean: per decoded token, the number of tokens on the path before it, and
        the number that attention has read.
    left_out_mean: mean attention weight of the tokens that were not read. An upper bound if the
        method scores whole pages; None if its scores do not show this weight.
    corrections: number of heads whose estimated query was too far from the real one
        (`--sparse-correct`).
    why: reason, as text, why `auto` chose this method; None if the user chose the method.
    """

    method: str
    tokens: int = counter_field("sparse_tokens")
    visible_mean: float | None = counter_field("visible_tokens", per="sparse_tokens")
    selected_mean: float | None = counter_field("selected_tokens", per="sparse_tokens")
    left_out_mean: float | None = counter_field("left_out", per="sparse_heads")
    corrections: int
    why: str | None

    def line(self) -> str:
        """Return a line for users: the method, the share of attention not read, and the reason."""
        left = self.left_out_mean
        said = "" if left is None else f", {left:.1%} of attention not read"
        return f"--sparse {self.method}{said}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, kw_only=True)
class RemoteStats(CounterView):
    """Traffic with a remote server while the problem was in flight, other problems included.

    token_ids: True if the server returns the sampled token ids; False if texts are tokenised here.
    requests: requests to the server, retries included.
    prompt_tokens, cached_tokens: prompt tokens, and prompt tokens found in the server's cache. Both
        are None if the server does not report them.
    """

    token_ids: bool
    requests: int
    retries: int
    prompt_tokens: int | None = counter_field("prompt_tokens", unless="untold_prompts")
    cached_tokens: int | None = counter_field("cached_tokens", unless="untold_cached")

    @property
    def prefilled(self) -> int | None:
        """Prompt tokens that the server computed; None if it does not report them."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, kw_only=True)
class SpeculationStats(CounterView):
    """Speculative decoding of steps before selection: rows of all problems, tokens of this tree.

    kept: speculated tokens of nodes that selection opened later.
    kept_share: kept / tokens.
    """

    mode: str
    rows: int = counter_field("speculative_rows")
    tokens: int
    kept: int
    kept_share: float | None


@dataclass(frozen=True)
class TimeStats:
    """Wall time by phase, in seconds; phases do not overlap.

    both_s: time in which scoring ran concurrently with decoding or planning.
    """

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

    lineage: the lineage of the chosen candidate.
    reason_fewer: why there are fewer candidates than requested; None if all were found.
    warnings: reasons to doubt the result, a line each.
    last_step: the last step of the chosen candidate, if it states no answer.
    weights: by role, the models with layers whose weights were not on the device.
    settings: the settings used, with the defaults of strategy and verifier filled in.
    receipt: settings, digests and versions from which `verify` repeats the search.
    tree: every node with its tokens, text, scores and state, without KV.
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
    weights: Mapping[str, WeightStats]
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
        """The candidate whose answer was chosen."""
        return next(each for each in self.candidates if each.lineage == self.lineage)

    def __repr__(self) -> str:
        took = f"{self.tokens.generated:,} tokens, {self.time.total_s:.2f} s"
        doubts = f", warnings: {len(self.warnings)}" if self.warnings else ""
        score, num = _short(self.score), len(self.candidates)
        return f"<Solution {self.answer!r:.80}, score {score}, {num} candidates, {took}{doubts}>"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: answer, score, warnings, five candidates, and the tree."""
        stated = self.last_step or self.chosen.said if self.answer is None else self.answer
        doubts = "".join(f"<p>Warning: {escape(line)}</p>" for line in self.warnings)
        rows = [("answer", "score", "ended", "tokens")]

        # the chosen candidate first, then by score
        def rank(each: Candidate) -> tuple[bool, float]:
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
        """Return the tree page (`--tree`) as HTML, or the chosen path if the page is too large."""
        title = self.problem or "synthetic prompt"
        page = tree_page(self.tree, self.tree.node(self.lineage), "search", title)
        if len(page) > _MOST_PAGE_CHARACTERS:
            return f"<pre>{escape(self.text)}</pre><p>The whole tree is too large to show here.</p>"
        # The frame is sandboxed without an origin, so the page's scripts cannot reach the notebook.
        return (
            '<iframe sandbox="allow-scripts allow-downloads" loading="lazy" title="The tree" '
            f'style="width:100%;height:640px;border:0" srcdoc="{escape(page)}"></iframe>'
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object that `solve --json` prints: everything except the tree's nodes.

        The key `tree` of this object holds the figures of `tree_stats`.
        """
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in content.items():
            if is_dataclass(value) and not isinstance(value, type):
                content[name] = asdict(value)
        if not self.tokens.thought:
            del content["tokens"]["thought"]
        content["weights"] = {name: asdict(each) for name, each in self.weights.items()}
        content["candidates"] = [candidate.to_json() for candidate in self.candidates]
        content["tree"] = content.pop("tree_stats")
        content["settings"] = self.settings.model_dump(mode="json")
        return content

    def export(
        self, file: Path | str | None = None, reward: Callable[[Node], float | None] | None = None
    ) -> list[dict[str, Any]]:
        """Return the tree as training data, one row per decoded step, pruned steps included.

        Columns: `input_ids` (all tokens up to the step's last), `completion_mask` (1 for the step's
        own tokens), `logprobs` at temperature 1, `sampled_logprobs`, `reward` (mean of the paths
        through the step), `advantage` (reward minus the parent's), `step`, `parent` and more.
        `sampled_logprobs` are those of the behaviour policy, after temperature and filters; None
        unless the solver was made with `sampled_logprobs=True`.

        file: also write the rows there as JSON lines.
        reward: function from a path's last step to its reward; by default the path's score.
        """
        temperature = self.settings.sampling.temperature
        rows = export_steps(self.tree, temperature, reward or (lambda node: node.score))
        if file is not None:
            write_atomically(Path(file), "".join(json.dumps(row) + "\n" for row in rows))
        return rows


def _short(score: float | None) -> str:
    return "-" if score is None else f"{score:.3g}"

"""The options of a `Solver`, with their types, for completion and type checkers.

They are the settings (`config.Settings`) and the options that the built-in strategies declare;
a test holds names, types and defaults to these. Options that a plugin declares go by name, too,
but no type checker knows them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, get_type_hints

from beamwright.config import Explore, Settings, Sparse, Speculation, Victims
from beamwright.protocols import SchedulePolicy, Verifier
from beamwright.runtime.limits import StopFunction
from beamwright.verify import ScoreFunction


class RequestOptions(TypedDict, total=False):
    """What every problem may have of its own; what is left out, or None, is the solver's."""

    # sampling: How one token is drawn from the logits.

    temperature: float
    """0 is greedy."""
    top_p: float
    """Keep the most likely tokens up to this probability."""
    top_k: int | None
    """Keep this many of the most likely tokens."""
    min_p: float | None
    """Drop tokens less likely than this share of the likeliest."""
    top_logprobs: int
    """Keep so many of the likeliest tokens beside each one (`node.top`); the same tree."""

    # step: Where a step, and a path, ends.

    delimiter: str
    r"""Text that ends a step; \n and \t are understood."""
    step_tokens: int | None
    """Steps of this fixed length instead of the delimiter."""
    max_step_tokens: int
    """Longest step."""
    step_limits: Sequence[int] | str | None
    """Longest first, second, ... step; the last stands for the rest."""
    max_tokens: int | None
    """Longest path after the prompt; revise: longest reply."""
    ignore_eos: bool
    """Go on after the end-of-text token."""
    stop_strings: Sequence[str] | str
    """A path ends, complete, where its reply holds one of these; its text ends before it."""

    # search: Which strategy, how wide, and how the final answer is chosen; options of the strategy.

    search: str | None
    """Strategy; list explains them all (default: beam; majority where there is no verifier)."""
    n: int
    """Candidates per round."""
    width: int
    """Children per survivor; n / width survive a round."""
    max_rounds: int
    """Most rounds of a search; lookahead, mcts, deepconf: most steps of a path."""
    filter_duplicates: bool
    """Keep one of several candidates with the same text."""
    aggregate: Literal["last", "min", "prod", "mean"] | None
    """From step scores to a path's score (default: the verifier's)."""
    choose: Literal["best", "majority", "weighted"] | None
    """How the final answer is chosen (default: the strategy's own)."""
    compat: Literal["search-and-learn"] | None
    """beam: another project's rules of selection, replication and padding."""
    seed: int
    """Seed of every random draw."""

    # stop: What ends a search early, with the best so far. The tree up to there is the same.

    deadline: float | str | None
    """Stop this long after the search starts or is resumed (`submit`: after it is submitted): 30s,
    2m, 1h.
    """
    token_budget: int | None
    """Stop once this many tokens are generated."""
    stop_votes: bool
    """Stop once the vote is settled; with --choose majority or weighted."""
    stop_score: float | None
    """Stop once a finished candidate scores at least this."""
    stop: str | StopFunction | Sequence[str | StopFunction] | None
    """Stop where these say so: names of declared stops, functions of a tree."""

    # search: Options of one strategy.

    warmup: int | None
    """deepconf: Paths that set the bar (default: n / 4, at most 16)."""
    keep: float | None
    """deepconf: Share of the warm-up at or above the bar."""
    branching: Literal["softmax", "linear"] | None
    """dynamic: Children by softmax of the score, or in linear proportion."""
    score_temperature: float | None
    """dynamic, particles: Temperature of the softmax over scores."""
    lookahead: int | None
    """lookahead: Steps of a rollout."""
    exploration: float | None
    """mcts: Weight of the exploration bonus; 0 follows scores."""
    nodes: int | None
    """mcts: Most steps that are written (default: 16 n)."""
    ess: float | None
    """particles: Resample at or below this effective share."""
    revisions: int | None
    """revise: Critiques and new answers per path."""
    critique_prompt: str | None
    """revise: What asks for a critique."""
    revision_prompt: str | None
    """revise: What asks for a new answer."""


class ProblemOptions(RequestOptions, total=False):
    """What one of several problems may have of its own. The tree depends on the others alone."""

    # who goes first

    priority: int
    """A problem of a larger priority begins, is decoded and is scored before others (default: 0).
    Nobody waits for ever: see docs/python.md.
    """


class SolverOptions(RequestOptions, total=False):
    """What `Solver` takes by name; what is left out, or None, has the default of the settings."""

    # model: Which models run, where and in what precision.

    model: str | PathLike[str]
    """Generator: PATH, bundled, bundled:strong, hf:ORG/NAME[@REVISION] or random:SHAPE; elsewhere:
    openai:URL#NAME (a server), vllm:PATH (vLLM, in this process). The bundled models know one kind
    of problem: "NAME has N THINGS. In MONTH NAME gets N THINGS. ... How many THINGS does NAME have
    now?"
    """
    verifier: str | PathLike[str] | ScoreFunction | Verifier | None
    """What scores steps: PATH, family:NAME:PATH, judge:PATH, logprob, none, ... (default: bundled
    beside --model bundled, else none).
    """
    system_prompt: str | None
    """System message of the chat template."""
    chat_template: str | PathLike[str] | None
    """Jinja chat template, or a file that holds one."""
    tokenizer: str | PathLike[str] | None
    """openai:...: the model's tokenizer, PATH, hf:ORG/NAME or bundled (default: its name)."""
    model_key: str | PathLike[str] | None
    """openai:...: a file that holds the server's API key."""
    device: str
    """Where the models run: cpu, cuda, cuda:1."""
    verifier_device: str | None
    """Where the verifier runs, apart from the generator: `memory` is then of each (default: beside
    it).
    """
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"]
    """Precision of weights, activations and KV."""
    attention: Literal["auto", "reference", "dense", "tree", "triton-dense", "triton-tree"]
    """How decoding attends to shared prefixes; tree and dense run kernels on a GPU."""
    context: int | None
    """Cap on the model's context."""
    weights: Literal["auto", "int8", "int4"]
    """Keep the generator's weights so; auto is their dtype."""
    verifier_weights: Literal["auto", "int8", "int4"]
    """The same for the verifier's."""
    deterministic: bool
    """Compute in tiles of a fixed size: the same tree whatever the groups, on a GPU too."""

    # memory: One memory number, and its parts where a user wants to name them.

    memory: int | str | None
    """All that may be used on the device, such as 7GiB."""
    kv_memory: int | str | None
    """Device KV cache alone; overrides the plan."""
    host_memory: int | str | None
    """Most KV kept in host memory (default: half of it; for a GPU at most 16 GiB)."""

    split: Literal["auto", "roofline", "offload"] | float
    """Who has the KV memory. auto: generator and verifier in turn get what they need, the other's
    KV leaving only where it is in the way; roofline: FlashTTS's search over batch sizes before
    every round; offload: everything in turn; a share: the generator's, fixed.
    """

    # schedule: How beams are arranged on the device. Never changes the tree, only the time.

    schedule: str | SchedulePolicy
    """How beams are arranged on the device."""
    planner: Literal["ranges", "greedy"]
    """Groups by dynamic programming over ranges, or by LBS's Algorithm 1."""
    inter_beam: bool
    """Group beams that share a prefix, and move the prefix once."""
    balance: bool
    """Groups of even size, as few as possible."""
    prefetch: bool
    """Load the next group's KV while a group computes."""
    reuse: bool
    """Keep what is on the device from one step to the next."""
    evict: Literal["host", "recompute"]
    """Evicted KV comes back from host memory, or is computed again."""
    victims: Victims
    """Whose KV leaves the device first: what the round does not use, then what it uses last (tree);
    least recently used, deepest first (lru, as vLLM); what the round does not use, then what is
    cheapest to bring back (cost).
    """
    link_bandwidth: int | str | None
    """Throttle the link to this rate (emulated)."""
    max_batch: int | None
    """Most beams decoded together."""
    batching: Literal["auto", "continuous", "grouped"]
    """Beams join as soon as there is room (continuous), or group by group behind barriers (grouped,
    the LBS paper); auto: barriers where the tree outgrows the device.
    """
    speculation: Speculation
    """Decode children of complete steps in slots that nobody waits for, before selection has chosen
    (exact: the tree is the same; truncate: it is not, as in FlashTTS siblings begin with a part of
    what one of them has); auto: exact where it pays.
    """
    verify_ahead: Literal["slack", "never"]
    """Steps that were decoded ahead are scored, too, while the verifier has nothing else (slack),
    or once they are chosen (never).
    """
    write_back: Literal["auto", "eager", "lazy"]
    """Store KV on the host as soon as it is complete (eager), or what has to leave next, a group
    ahead (lazy); auto: lazy until a step needs more than twice the device.
    """
    explore: Explore
    """Several problems in flight: all decode, are scored and decide together (lockstep, as in
    search-and-learn), each goes at its own pace (continuous), or problems are taken in until the
    device is busy, and scored together (decoupled).
    """
    min_problems: int | None
    """Others begin only when fewer problems are in flight (default: at once; in lockstep when all
    have ended).
    """
    executor: Literal["auto", "plain", "overlapped"]
    """Score and decode in turns (plain), or at the same time where several problems are in flight
    (overlapped); auto: what is measured to be faster.
    """
    order: Literal["greedy", "siblings", "depth-first", "random", "worst"] | None
    """Order of beams of `schedule="prefix"`."""
    order_seed: int | None
    """Of `order="random"`."""
    graphs: Literal["auto", "on", "off"]
    """Decode steps as CUDA graphs where kernels run (auto, on), or as plain calls (off)."""
    score_cache: str | PathLike[str] | None
    """Keep the verifier's scores in this file, or for as long as the solver lives (memory): steps
    that were scored before are not scored again. The same scores.
    """

    # sparse: Which tokens decoding attends to where paths are long. Changes the tree.

    sparse: Sparse
    """Which tokens decoding attends to where paths are long (docs/sparse.md)."""
    select: int | float | str
    """Tokens that `sparse` selects for each KV head: a number, "all", or a share such as 1/8."""
    sparse_from: int
    """Up to a path of so many tokens `sparse` reads all."""
    sparse_layers: int
    """First layers that read all with `sparse`."""
    sparse_lag: int
    """How far ahead asyncspade and its like predict."""
    sparse_window: int
    """Queries that they predict from."""
    sparse_frame: Literal["post", "pre"]
    """Queries are predicted behind rotary positions, or before (pre)."""
    sparse_correct: float | None
    """A head whose query is less like the predicted one selects by its own (FreeKV)."""
    sparse_home: Literal["device", "host"]
    """Where all KV is with `sparse`: on the device, or on the host, the device having what is
    selected (`kv_memory`). The same tree.
    """
    sparse_rank: Literal["auto", "inline", "thread"]
    """Who finds what is selected by a query that is foreseen: the decoding thread (inline) or one
    beside it; auto: a thread where KV is on the host. The same tree.
    """
    late: Literal["wait", "previous"]
    """Where a thread has not yet found what a layer reads: wait, or read what the token before did
    (previous), so that timing chooses tokens, and `exact` is False.
    """


def with_options(call: Callable[..., Any]) -> inspect.Signature:
    """The signature of `call`, whose `**options` are a solver's, with every option by name.

    Help and notebooks show it, with types and the defaults of the settings.
    """
    _, *own, rest = inspect.signature(call, eval_str=False).parameters.values()
    defaults = {
        name: field.default
        for section in Settings.model_fields.values()
        for name, field in section.annotation.model_fields.items()  # type: ignore[union-attr]
    }
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind
        )
        for name, kind in get_type_hints(SolverOptions).items()
    ]
    return inspect.Signature([*own, *options, rest.replace(annotation=inspect.Parameter.empty)])

"""The options of a `Solver`. Written by `make stubs` from the settings; not by hand."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from beamwright.engine.decisions import StopFunction
from beamwright.protocols import Verifier
from beamwright.verify.scorers import ScoreFunction

SHARED: tuple[str, ...]
PER_REQUEST: tuple[str, ...]

class RequestOptions(TypedDict, total=False):
    temperature: float
    """0 is greedy."""
    top_p: float
    """Keep the most likely tokens up to this probability."""
    top_k: int | None
    """Keep this many of the most likely tokens."""
    min_p: float | None
    """Drop tokens less likely than this share of the likeliest."""
    top_logprobs: int
    """Likeliest tokens to keep beside each one (Python, checkpoints)."""
    delimiter: str
    r"""Text that ends a step; \n and \t are understood."""
    step_tokens: int | None
    """Steps of this length, not the delimiter's."""
    max_step_tokens: int
    """Longest step."""
    step_limits: Sequence[int] | str | None
    """Longest first, second, ... step; the last stands for the rest."""
    max_tokens: int | None
    """Longest path after the prompt; revise: longest reply."""
    thinking: Literal["auto", "on", "off"] | int
    """Whether a model that can think does (on, off), and for how many tokens at most; auto: as
    its chat template has it.
    """
    now: str | None
    """Time that chat templates see, such as 2026-11-28 (default: of a template that reads it,
    when the search begins); part of receipts and checkpoints.
    """
    soft_close: float
    """In the last quarter of --thinking TOKENS a thought ends where its end is at least so
    likely; above 1: never before the last token.
    """
    close_message: str
    r"""What a thought is made to say before it is closed; \n is understood."""
    thought_steps: Literal["auto", "whole", "paragraphs", "sentences", "markers"] | int
    """Steps inside thoughts: whole, paragraphs, sentences, markers (Wait, Hmm, ...), or so many
    tokens; auto: whole where the verifier sees no thoughts, else as outside.
    """
    ignore_eos: bool
    """Go on after the end-of-text token."""
    stop_strings: Sequence[str] | str
    r"""A path ends, complete, where its reply holds this; its text ends before it. May be given
    several times; \n and \t are understood.
    """
    search: str | None
    """Strategy; list explains them all (default: beam; majority without a verifier)."""
    n: int
    """Candidates per round."""
    width: int
    """Children per survivor; n / width survive a round."""
    max_rounds: int
    """Most rounds of a search; lookahead, mcts, deepconf: most steps of a path."""
    filter_duplicates: bool
    """Keep one of several candidates with the same text; dvts: in each subtree."""
    aggregate: Literal["last", "min", "prod", "mean"] | None
    """From step scores to a path's score (default: the verifier's)."""
    verify_every: int
    """Score every so manyth step of a path, and its last; the others go on by one child each."""
    choose: Literal["best", "majority", "weighted"] | None
    """How the answer is chosen (default: the strategy's)."""
    answers: str
    """What of a reply is its answer, and when two are the same: math, code, or a plugin's."""
    seed: int
    """Seed of every random draw."""
    deadline: float | str | None
    """Stop this long after the search starts or is resumed: 30s, 2m, 1h."""
    token_budget: int | None
    """Stop once this many tokens are generated: looked at between rounds, so that the last one
    may go beyond.
    """
    stop_votes: bool
    """Stop once the vote is settled; with --choose majority or weighted."""
    stop_confidence: float | None
    """Stop behind a --wave whose leading answer is so likely to stay ahead of the next one
    (Adaptive-Consistency); with --choose majority.
    """
    first_k: int | None
    """Stop once so many paths have finished."""
    foresight: Literal["scores", "bins"] | None
    """beam, varying, dvts, lookahead: How to choose the steps whose children are decoded ahead:
    by their own scores, or by the bin of their parents' scores (FlashTTS's SelectSPEC).
    """
    wave: int | None
    """best-of-n, majority, weighted: Paths at a time; the next begin if nothing stops the
    search.
    """
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
    """mcts: Most steps to generate (default: 16 n)."""
    ess: float | None
    """particles: Resample at or below this effective share."""
    revisions: int | None
    """revise: Critiques and new answers per path."""
    critique_prompt: str | None
    """revise: User message that asks for a critique."""
    revision_prompt: str | None
    """revise: User message that asks for a new answer."""
    stop: StopFunction | Sequence[StopFunction] | None
    """Of a tree whose round is scored: why it ends here, or None to go on; asked last."""

class ProblemOptions(RequestOptions, total=False):
    priority: int
    """A problem of a larger priority begins, is decoded and is scored first (default: 0)."""

class SolverOptions(RequestOptions, total=False):
    model: str | PathLike[str]
    """Generator: PATH, bundled, bundled:strong, bundled:thinking, hf:ORG/NAME[@REVISION] or
    random:SHAPE; elsewhere: openai:URL#NAME (a server). The bundled models know one kind of
    problem: "NAME has N THINGS. In MONTH NAME gets N THINGS. ... How many THINGS does NAME
    have now?"
    """
    verifier: str | PathLike[str] | ScoreFunction | Verifier | None
    """What scores steps: PATH, family:NAME:PATH, judge:PATH, logprob, none, ... (default:
    bundled beside --model bundled, else none).
    """
    system_prompt: str | None
    r"""System message of the chat template (default: to reason step by step and to put the answer
    in \boxed{}; "" for none).
    """
    chat_template: str | PathLike[str] | None
    """Jinja chat template, or a file that holds one."""
    template_args: Mapping[str, Any] | str
    """Arguments of the chat template, such as '{"enable_thinking": false}'."""
    tokenizer: str | PathLike[str] | None
    """openai:...: the tokenizer, PATH or hf:ORG/NAME (default: its name)."""
    model_key: str | PathLike[str] | None
    """openai:...: a file that holds the server's API key."""
    device: str
    """Where the models run: cpu, cuda, cuda:1."""
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"]
    """Precision of weights, activations and KV; auto on a CPU is float32, or bfloat16 for a
    checkpoint of 100 million parameters and more, where the CPU multiplies it exactly.
    """
    decoder: Literal["auto", "own", "transformers"]
    """What runs the models' layers: own (dense families, fastest), transformers (any causal
    model whose attention goes through its interface); auto: own where it can.
    """
    attention: Literal["auto", "reference", "dense", "tree", "triton-dense", "triton-tree"]
    """How decoding attends to shared prefixes (tree, dense: kernels on a GPU)."""
    context: int | None
    """Cap on the model's context."""
    weights: Literal["auto", "int8", "int4"]
    """Keep the generator's weights so; auto is as a quantised file has them, else their dtype.
    int8 and int4 are faster on most CPUs.
    """
    verifier_weights: Literal["auto", "int8", "int4"]
    """The same for the verifier's."""
    kv_dtype: Literal["auto", "int8", "fp8"]
    """Keep both models' KV in 8 bits, on the device, the host and the link: int8, or fp8
    (float8_e4m3); auto: in their dtype. Changes the tree.
    """
    deterministic: bool
    """Compute in tiles of a fixed size: the same tree whatever the groups, on a GPU too."""
    memory: int | str | None
    """All that may be used on the device, such as 7GiB."""
    kv_memory: int | str | None
    """Device KV cache alone; overrides the plan."""
    host_memory: int | str | None
    """Most KV in host memory (default: half of it; GPU: at most 16 GiB)."""
    split: Literal["auto"] | float
    """Who has the KV memory. auto: generator and verifier in turn get what they need, the
    other's KV leaving only where it is in the way; SHARE: the generator's, fixed.
    """
    schedule: str
    """How beams are arranged on the device."""
    planner: Literal["ranges", "greedy"]
    """Groups by dynamic programming, or by LBS's Algorithm 1."""
    inter_beam: bool
    """Beams that share a prefix move it once."""
    balance: bool
    """Groups of even size, as few as possible."""
    prefetch: bool
    """Load a group's KV while one computes."""
    reuse: bool
    """Keep what is on the device between steps."""
    evict: Literal["host", "recompute"]
    """Evicted KV comes back from host memory, or is computed again."""
    link_bandwidth: int | str | None
    """Throttle the link to this rate (emulated)."""
    max_batch: int | None
    """Most beams decoded together."""
    batching: Literal["auto", "continuous", "grouped"]
    """Beams join as soon as there is room, and wait on the host where it ends (continuous), or
    group by group behind barriers (grouped, the LBS paper); auto: whichever is expected to be
    faster in each round; continuous where steps have no fixed length.
    """
    explore: Literal["lockstep", "continuous", "decoupled"]
    """Several problems in flight: all decode, are scored and decide together (lockstep, as in
    search-and-learn), each goes at its own pace (continuous), or problems are taken in until
    the device is busy, and scored together (decoupled).
    """
    executor: Literal["auto", "plain", "overlapped"]
    """Score and decode in turns (plain), or at the same time where several problems are in
    flight (overlapped); auto: what was measured to be faster.
    """
    verifiers: int
    """Verifiers that score beside decoding, over one copy of the weights: each has a thread, its
    part of the verifier's KV, and problems of its own.
    """
    speculation: Literal["off", "exact", "truncate", "auto"]
    """Decode children of complete steps in slots that nobody waits for, before selection has
    chosen among those steps (exact: the tree is the same; truncate: it is not, as in FlashTTS
    siblings begin with a part of what one of them has); auto: exact where it pays.
    """
    truncation: float
    """Mean share of a sibling that copies keep (truncate; FlashTTS's R)."""
    drafts: Literal["auto", "off"] | int
    """Tokens a row, at most, to guess from the tree's own text and to verify in one pass: the
    same tree in fewer passes. auto: as many as pay, by what passes take and guesses hold.
    """
    verify_ahead: Literal["slack", "never"]
    """Steps that were decoded ahead are scored once they are chosen (never), or at once, while
    the verifier has nothing else (slack: FlashTTS's LookAhead Verification).
    """
    write_back: Literal["auto", "eager", "lazy"]
    """Send new KV to the host as soon as it is whole (eager), or shortly before its room is
    needed (lazy: most of what is pruned never goes); auto: eager where a step needs half as
    much again as the device, where rows park, or with a copy per beam.
    """
    graphs: Literal["auto", "on", "off"]
    """Decode steps as CUDA graphs where kernels run (auto, on), or as plain calls (off)."""
    sparse: str
    """Which tokens decoding attends to where paths are long: all (off), those with the largest
    scores (exact), the same among the best pages (pages), whole pages (quest), by the query
    of the layer before (ahead, ahead-pages), or by one predicted from earlier tokens
    (asyncspade; -printed, -ridge: other readings of it). auto: exact with KV at home on the
    host where that gains by the cost model, else off. Changes the tree.
    """
    select: int | float | str
    """Tokens that --sparse selects for each KV head: a number, all, or a share such as 1/8."""
    sparse_from: int
    """Up to a path of so many tokens --sparse reads all."""
    sparse_layers: int
    """First layers that read all with --sparse."""
    sparse_correct: float | None
    """A head whose query is less like the predicted one selects by its own (FreeKV)."""
    sparse_home: Literal["device", "host"]
    """Where all KV is with --sparse: on the device, or on the host, the device having what is
    selected (--kv-memory). The same tree.
    """

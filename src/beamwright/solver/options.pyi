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
    """Sampling temperature; 0 is greedy."""
    top_p: float
    """Keep the likeliest tokens up to this probability."""
    top_k: int | None
    """Keep this many of the likeliest tokens."""
    min_p: float | None
    """Drop tokens below this share of the highest probability."""
    top_logprobs: int
    """Likeliest tokens to record at each position (Python, checkpoints)."""
    delimiter: str
    r"""Text that ends a step; \n and \t are understood."""
    step_tokens: int | None
    """Fixed length of a step; replaces --delimiter."""
    max_step_tokens: int
    """Limit on the tokens of a step."""
    step_limits: Sequence[int] | str | None
    """Limits of the first, second, ... step; the last one holds for all later steps."""
    max_tokens: int | None
    """Limit on a path's tokens after the prompt; with --search revise, on each reply's."""
    thinking: Literal["auto", "on", "off"] | int
    """Whether a thinking model thinks (on, off), or the limit of a thought in tokens. auto: as
    the chat template does by default.
    """
    now: str | None
    """Time that chat templates see, such as 2026-11-28 (default: the start of the search).
    Receipts and checkpoints store it if a template reads it.
    """
    soft_close: float
    """Probability of a thought's end that ends it in the last quarter of --thinking TOKENS;
    above 1: only at the limit.
    """
    close_message: str
    r"""Text appended to a thought that is cut off; \n is understood."""
    thought_steps: Literal["auto", "whole", "paragraphs", "sentences", "markers"] | int
    """Steps inside thoughts: whole, paragraphs, sentences, markers (Wait, Hmm, ...) or a fixed
    length. auto: whole if the verifier does not score thoughts, else as outside.
    """
    ignore_eos: bool
    """Continue after the end-of-text token."""
    stop_strings: Sequence[str] | str
    r"""Text that completes a path and is cut from its reply. Repeat the option for several texts;
    \n and \t are understood.
    """
    search: str | None
    """Strategy; list shows all (default: beam, or majority without a verifier)."""
    n: int
    """Candidates per round."""
    width: int
    """Children per survivor; n / width candidates survive a round."""
    max_rounds: int
    """Limit on rounds; lookahead, mcts, deepconf: on the steps of a path."""
    filter_duplicates: bool
    """Keep one of several candidates with equal text; dvts: in each subtree."""
    aggregate: Literal["last", "min", "prod", "mean"] | None
    """How step scores give a path's score (default: the verifier's)."""
    verify_every: int
    """Score a path's last step and every N-th; unscored steps get one child."""
    choose: Literal["best", "majority", "weighted", "synthesis"] | None
    """How the answer is chosen, or that it is written anew (default: the strategy's)."""
    synthesis_size: int
    """Candidates that --choose synthesis reads."""
    synthesis_prompt: str | None
    """Prompt of --choose synthesis, with {problem} and {solutions}."""
    answers: str
    """How answers are read and compared: math, code, or a plugin's."""
    seed: int
    """Seed of every random draw."""
    deadline: float | str | None
    """Stop this long after the search starts or resumes: 30s, 2m, 1h."""
    token_budget: int | None
    """Stop after the round in which this many tokens are generated."""
    stop_votes: bool
    """Stop once the vote is decided; needs --choose majority or weighted."""
    stop_confidence: float | None
    """Stop after a --wave whose leading answer stays ahead with this probability (Adaptive-
    Consistency); needs --choose majority.
    """
    first_k: int | None
    """Stop once this many paths have finished."""
    foresight: Literal["scores", "bins"] | None
    """beam, varying, dvts, lookahead: What ranks steps for speculation: their own scores, or the
    bins of their parents' scores (FlashTTS's SelectSPEC).
    """
    wave: int | None
    """best-of-n, majority, weighted: Paths per wave; the next wave starts unless a stop rule
    holds.
    """
    warmup: int | None
    """deepconf: Warm-up paths that set the bar (default: n / 4, at most 16)."""
    keep: float | None
    """deepconf: Share of warm-up paths at or above the bar."""
    branching: Literal["softmax", "linear"] | None
    """dynamic: Children in proportion to the softmax of scores, or to scores."""
    score_temperature: float | None
    """dynamic, particles: Temperature of the softmax over scores."""
    lookahead: int | None
    """lookahead: Steps of a greedy rollout."""
    exploration: float | None
    """mcts: Weight of the exploration bonus; 0 follows scores."""
    nodes: int | None
    """mcts: Limit on generated steps (default: 16 n)."""
    ess: float | None
    """particles: Resample when the effective share of paths is at most this."""
    revisions: int | None
    """revise: Critiques and new answers per path."""
    critique_prompt: str | None
    """revise: User message that asks for a critique."""
    revision_prompt: str | None
    """revise: User message that asks for a new answer."""
    aggregate_size: int | None
    """aggregate: Answers of the last generation that a new answer is written from."""
    aggregate_rounds: int | None
    """aggregate: Generations of answers after the first one."""
    aggregate_prompt: str | None
    """aggregate: Prompt for a new answer, with {problem} and {solutions}."""
    guide: bool | None
    """aggregate: Draw answers by their scores, and reject new answers with lower scores (PRISM)."""
    stop: StopFunction | Sequence[StopFunction] | None
    """Of a tree whose round is scored: why it ends here, or None to go on; asked last."""

class ProblemOptions(RequestOptions, total=False):
    priority: int
    """A problem of a larger priority begins, is decoded and is scored first (default: 0)."""

class SolverOptions(RequestOptions, total=False):
    model: str | PathLike[str]
    """Generator: PATH, bundled, bundled:strong, bundled:thinking, hf:ORG/NAME[@REVISION],
    random:SHAPE, or openai:URL#NAME for a remote server. The bundled models solve one kind of
    problem: "NAME has N THINGS. In MONTH NAME gets N THINGS. ... How many THINGS does NAME
    have now?"
    """
    verifier: str | PathLike[str] | ScoreFunction | Verifier | None
    """What scores steps: PATH, family:NAME:PATH, judge:PATH, logprob, none, ... (default:
    bundled with --model bundled, else none).
    """
    system_prompt: str | None
    r"""System message of the chat template (default: reason step by step, answer in \boxed{}; ""
    for none).
    """
    chat_template: str | PathLike[str] | None
    """Jinja chat template, or a file that contains one."""
    template_args: Mapping[str, Any] | str
    """Arguments of the chat template, such as '{"enable_thinking": false}'."""
    tokenizer: str | PathLike[str] | None
    """Tokenizer of an openai:... model: PATH or hf:ORG/NAME (default: the model's name)."""
    model_key: str | PathLike[str] | None
    """File with the API key of an openai:... server."""
    device: str
    """Device of the models: cpu, cuda, cuda:1."""
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"]
    """Precision of weights, activations and KV. auto on a CPU: bfloat16 for checkpoints of 100
    million parameters or more if the CPU multiplies it exactly, else float32.
    """
    decoder: Literal["auto", "own", "transformers"]
    """Implementation of the layers: own (dense families, fastest) or transformers (any causal
    model that uses its attention interface). auto: own if possible.
    """
    attention: Literal["auto", "reference", "dense", "tree", "triton-dense", "triton-tree"]
    """How decoding attends to shared prefixes; on a GPU tree and dense are kernels."""
    context: int | None
    """Limit on the model's context."""
    weights: Literal["auto", "int8", "int4"]
    """Storage of the generator's weights: int8 or int4 (faster on most CPUs), or auto: as in the
    file if it is quantised, else --dtype.
    """
    verifier_weights: Literal["auto", "int8", "int4"]
    """Storage of the verifier's weights, as --weights."""
    kv_dtype: Literal["auto", "int8", "fp8"]
    """Storage of both models' KV: int8, fp8 (float8_e4m3), or auto for their dtype. Changes the
    tree.
    """
    deterministic: bool
    """Compute in tiles of a fixed size: grouping never changes the tree, even on a GPU."""
    sampled_logprobs: bool
    """Also keep log-probabilities after temperature and filters (Solution.export)."""
    memory: int | str | None
    """Limit on all memory used on the device, such as 7GiB."""
    kv_memory: int | str | None
    """Memory for KV on the device (default: computed from --memory)."""
    host_memory: int | str | None
    """Limit on KV in host memory (default: half; GPU: at most 16 GiB)."""
    weights_home: Literal["auto", "device", "host", "disk"]
    """Home of layers that do not fit in --memory; passes copy them to the device. auto: host for
    a GPU, disk for a CPU. device: refuse.
    """
    split: Literal["auto"] | float
    """How generator and verifier share KV memory: auto moves it to the model that needs it,
    SHARE fixes the generator's part.
    """
    schedule: str
    """How beams are arranged on the device."""
    planner: Literal["ranges", "greedy"]
    """Planner of groups: dynamic programming, or Algorithm 1 of LBS."""
    inter_beam: bool
    """Move a prefix once for all beams that share it."""
    balance: bool
    """Use as few groups as possible, of even size."""
    prefetch: bool
    """Load the next group's KV while a group computes."""
    reuse: bool
    """Keep KV on the device between steps."""
    evict: Literal["host", "recompute"]
    """Whether evicted KV is loaded from host memory or computed again."""
    link_bandwidth: int | str | None
    """Throttle the link to this bandwidth (emulation)."""
    max_batch: int | None
    """Limit on beams decoded together."""
    batching: Literal["auto", "continuous", "grouped"]
    """Admit beams as blocks become free, preempting some when none is left (continuous), or in
    groups between barriers (grouped, as in LBS). auto: the faster one by estimate, and
    continuous without --step-tokens.
    """
    explore: Literal["lockstep", "continuous", "decoupled"]
    """How problems in flight proceed: in step (lockstep, as in search-and-learn), each at its
    own pace (continuous), or admitted until the device is busy and scored together
    (decoupled).
    """
    executor: Literal["auto", "plain", "overlapped"]
    """Score and decode in turns (plain), or at the same time if several problems are in flight
    (overlapped). auto: the one that was faster in measurements.
    """
    verifiers: int
    """Verifier threads beside decoding, over one copy of the weights; each has its own problems
    and part of the KV.
    """
    speculation: Literal["off", "exact", "truncate", "auto"]
    """Decode children of finished steps in idle slots, before selection. exact: same tree;
    truncate: siblings start with a part of one child's tokens (FlashTTS), another tree; auto:
    exact if it pays.
    """
    truncation: float
    """Mean share of tokens that speculation truncate keeps (FlashTTS's R)."""
    drafts: Literal["auto", "off"] | int
    """Limit on draft tokens per row, taken from the tree's text and verified in one pass: same
    tree, fewer passes. auto: as many as pay.
    """
    verify_ahead: Literal["slack", "never"]
    """When speculative steps are scored: once selected (never), or while the verifier is idle
    (slack, FlashTTS's LookAhead Verification).
    """
    write_back: Literal["auto", "eager", "lazy"]
    """When new KV is written to the host: once complete (eager), or before its memory is needed
    (lazy). auto: eager if a round needs 1.5 times the device's KV, if rows are preempted, or
    with a copy per beam.
    """
    graphs: Literal["auto", "on", "off"]
    """Run decode steps as CUDA graphs if kernels run (auto, on), or as plain calls (off)."""
    sparse: str
    """Tokens that decoding attends to on long paths: all (off), the highest-scored (exact), the
    same within the best pages (pages), whole pages (quest), by the query of the layer before
    (ahead, ahead-pages), or by a predicted query (asyncspade). auto: exact with KV on the
    host if the cost model expects a gain, else off. Changes the tree.
    """
    select: int | float | str
    """Tokens that --sparse selects per KV head: a number, all, or a share such as 1/8."""
    sparse_from: int
    """Path length up to which --sparse attends to all tokens."""
    sparse_layers: int
    """First layers that attend to all tokens with --sparse."""
    sparse_correct: float | None
    """Least similarity of predicted and real query; below it a head uses the real one (FreeKV)."""
    sparse_home: Literal["device", "host"]
    """Where --sparse keeps all KV: on the device, or on the host with selected tokens on the
    device (--kv-memory). Same tree.
    """

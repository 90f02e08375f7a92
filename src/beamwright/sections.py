"""All settings by section: type, default, range and help text of each one.

A section is a frozen pydantic model that rejects unknown keys. The command line, recipes, the typed
options of `Solver`, the server's requests and the reference pages are generated from it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from beamwright import units
from beamwright.registry import option

# The form of the problems that the bundled models can solve.
GRAMMAR = "NAME has N THINGS. In MONTH NAME gets N THINGS. ... How many THINGS does NAME have now?"

# Limit on the candidates of a round and on the children of a step. A child has a node, a sampled
# token, a slot in a batch and some KB of host memory before its first token. Published repeated
# sampling goes up to 10,000 (arXiv 2407.21787).
MOST_CANDIDATES = 2**16

# Prefix of `--model` if a server generates the steps (`remote`).
ELSEWHERE = "openai:"

# How problems in flight share the device (`--explore`; `engine.queue`, `engine.engine`).
Explore = Literal["lockstep", "continuous", "decoupled"]

# Whether children of finished steps are decoded before selection has chosen among the steps.
Speculation = Literal["off", "exact", "truncate", "auto"]

# How a path's score follows from the scores of its steps, and how the answer is chosen.
Reduction = Literal["last", "min", "prod", "mean"]
AnswerChoice = Literal["best", "majority", "weighted"]
FinalChoice = Literal[AnswerChoice, "synthesis"]

Weights = Literal["auto", "int8", "int4"]
KVDtype = Literal["auto", "int8", "fp8"]
DecoderChoice = Literal["auto", "own", "transformers"]
TOKENS = "TOKENS"


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ExtensibleSection(Section):
    """A section that also accepts the options of a strategy, schedule or verifier that it names.

    These options are stored in `model_extra` by name. The package that declares the part checks
    them.
    """

    model_config = ConfigDict(frozen=True, extra="allow")


class ModelSettings(ExtensibleSection):
    """Which models run, where, and in which precision; also the options of a declared verifier."""

    model: units.ModelText = option(
        "bundled",
        "Generator: PATH, bundled, bundled:strong, bundled:thinking, hf:ORG/NAME[@REVISION], "
        "random:SHAPE, or openai:URL#NAME for a remote server. "
        f'The bundled models solve one kind of problem: "{GRAMMAR}"',
        metavar="MODEL",
    )
    verifier: units.TextOrNone = option(
        None,
        "What scores steps: PATH, family:NAME:PATH, judge:PATH, logprob, none, ... "
        "(default: bundled with --model bundled, else none).",
        metavar="MODEL",
    )
    system_prompt: str | None = option(
        None,
        "System message of the chat template (default: reason step by step, "
        r'answer in \boxed{}; "" for none).',
    )
    chat_template: units.TextOrNone = option(
        None, "Jinja chat template, or a file that contains one."
    )
    template_args: units.TemplateArgs = option(
        {},
        """Arguments of the chat template, such as '{"enable_thinking": false}'.""",
        metavar="JSON",
    )
    tokenizer: units.TextOrNone = option(
        None,
        "Tokenizer of an openai:... model: PATH or hf:ORG/NAME (default: the model's name).",
        metavar="MODEL",
    )
    model_key: units.TextOrNone = option(
        None, "File with the API key of an openai:... server.", metavar="FILE"
    )
    device: str = option("cpu", "Device of the models: cpu, cuda, cuda:1.")
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = option(
        "auto",
        "Precision of weights, activations and KV. auto on a CPU: bfloat16 for checkpoints of 100 "
        "million parameters or more if the CPU multiplies it exactly, else float32.",
    )
    decoder: DecoderChoice = option(
        "auto",
        "Implementation of the layers: own (dense families, fastest) or transformers (any causal "
        "model that uses its attention interface). auto: own if possible.",
    )
    attention: Literal["auto", "reference", "dense", "tree", "triton-dense", "triton-tree"] = (
        option(
            "auto", "How decoding attends to shared prefixes; on a GPU tree and dense are kernels."
        )
    )
    context: int | None = option(None, "Limit on the model's context.", ge=1, metavar=TOKENS)
    weights: Weights = option(
        "auto",
        "Storage of the generator's weights: int8 or int4 (faster on most CPUs), or auto: as in "
        "the file if it is quantised, else --dtype.",
    )
    verifier_weights: Weights = option("auto", "Storage of the verifier's weights, as --weights.")
    kv_dtype: KVDtype = option(
        "auto",
        "Storage of both models' KV: int8, fp8 (float8_e4m3), or auto for their dtype. Changes "
        "the tree.",
    )
    deterministic: bool = option(
        False, "Compute in tiles of a fixed size: grouping never changes the tree, even on a GPU."
    )
    sampled_logprobs: bool = option(
        False, "Also keep log-probabilities after temperature and filters (Solution.export)."
    )

    @property
    def is_random(self) -> bool:
        """True if the model is a shape with random weights, for measurements."""
        return self.model.startswith("random:")

    @property
    def runs_elsewhere(self) -> bool:
        """True if a remote server generates the steps (`remote`)."""
        return self.model.startswith(ELSEWHERE)

    @property
    def default_verifier(self) -> str:
        """The verifier that is used if the user names none.

        The bundled verifier was trained on the solutions of the bundled generators. It is no
        default for `bundled:thinking`: it has never seen a thought, or an answer without steps.
        """
        if self.is_random:
            return "logprob"
        return "bundled" if self.model in ("bundled", "bundled:strong") else "none"

    @property
    def verifier_or_default(self) -> str:
        """The verifier that the user named, or the default."""
        return self.default_verifier if self.verifier is None else self.verifier


class SamplingSettings(Section):
    """How a token is sampled from the logits."""

    temperature: float = option(0.8, "Sampling temperature; 0 is greedy.", ge=0.0)
    top_p: float = option(1.0, "Keep the likeliest tokens up to this probability.", gt=0, le=1.0)
    top_k: int | None = option(None, "Keep this many of the likeliest tokens.", ge=1, le=2**31 - 1)
    min_p: float | None = option(
        None, "Drop tokens below this share of the highest probability.", ge=0.0, le=1.0
    )
    top_logprobs: int = option(
        0, "Likeliest tokens to record at each position (Python, checkpoints).", ge=0, le=20
    )


class StepSettings(Section):
    """Where a step ends, and where a path ends."""

    delimiter: str = option(
        "\n\n", r"Text that ends a step; \n and \t are understood.", min_length=1
    )
    step_tokens: int | None = option(
        None, "Fixed length of a step; replaces --delimiter.", ge=1, metavar=TOKENS
    )
    max_step_tokens: int = option(256, "Limit on the tokens of a step.", ge=1, metavar=TOKENS)
    step_limits: units.StepLimits = option(
        None,
        "Limits of the first, second, ... step; the last one holds for all later steps.",
        min_length=1,
        metavar="TOKENS,...",
    )
    max_tokens: int | None = option(
        None,
        "Limit on a path's tokens after the prompt; with --search revise, on each reply's.",
        ge=1,
        metavar=TOKENS,
    )
    thinking: units.Thinking = option(
        "auto",
        "Whether a thinking model thinks (on, off), or the limit of a thought in tokens. auto: as "
        "the chat template does by default.",
        metavar="auto|on|off|TOKENS",
    )
    now: units.Time = option(
        None,
        "Time that chat templates see, such as 2026-11-28 (default: the start of the search). "
        "Receipts and checkpoints store it if a template reads it.",
        metavar="TIME",
    )
    soft_close: float = option(
        0.1,
        "Probability of a thought's end that ends it in the last quarter of --thinking TOKENS; "
        "above 1: only at the limit.",
        gt=0.0,
        metavar="PROBABILITY",
    )
    close_message: units.CloseMessage = option(
        "", r"Text appended to a thought that is cut off; \n is understood.", metavar="TEXT"
    )
    thought_steps: units.ThoughtSteps = option(
        "auto",
        "Steps inside thoughts: whole, paragraphs, sentences, markers (Wait, Hmm, ...) or a fixed "
        "length. auto: whole if the verifier does not score thoughts, else as outside.",
        metavar="auto|whole|paragraphs|sentences|markers|TOKENS",
    )
    ignore_eos: bool = option(False, "Continue after the end-of-text token.")
    stop_strings: units.StopStrings = option(
        (),
        "Text that completes a path and is cut from its reply. Repeat the option for several "
        r"texts; \n and \t are understood.",
        max_length=16,
        metavar="TEXT",
    )

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a step."""
        return self.step_tokens or max(self.step_limits or (self.max_step_tokens,))


class SearchSettings(ExtensibleSection):
    """Which strategy runs, how wide, how the answer is chosen; also the strategy's options."""

    search: str | None = option(
        None,
        "Strategy; list shows all (default: beam, or majority without a verifier).",
        metavar="NAME",
    )
    n: int = option(16, "Candidates per round.", ge=1, le=MOST_CANDIDATES)
    width: int = option(
        4, "Children per survivor; n / width candidates survive a round.", ge=1, le=MOST_CANDIDATES
    )
    max_rounds: int = option(
        40, "Limit on rounds; lookahead, mcts, deepconf: on the steps of a path.", ge=1
    )
    filter_duplicates: bool = option(
        False, "Keep one of several candidates with equal text; dvts: in each subtree."
    )
    aggregate: Reduction | None = option(
        None, "How step scores give a path's score (default: the verifier's)."
    )
    verify_every: int = option(
        1,
        "Score a path's last step and every N-th; unscored steps get one child.",
        ge=1,
        metavar="N",
    )
    choose: FinalChoice | None = option(
        None, "How the answer is chosen, or that it is written anew (default: the strategy's)."
    )
    synthesis_size: int = option(8, "Candidates that --choose synthesis reads.", ge=1)
    synthesis_prompt: str | None = option(
        None, "Prompt of --choose synthesis, with {problem} and {solutions}.", metavar="TEXT"
    )
    answers: str = option(
        "math", "How answers are read and compared: math, code, or a plugin's.", metavar="NAME"
    )
    seed: int = option(0, "Seed of every random draw.", ge=0)


class StopSettings(Section):
    """Conditions that end a search early, with the best candidates so far.

    Until one of them holds, the tree is the same as without them.
    """

    deadline: units.Duration = option(
        None,
        "Stop this long after the search starts or resumes: 30s, 2m, 1h.",
        metavar="DURATION",
    )
    token_budget: int | None = option(
        None,
        "Stop after the round in which this many tokens are generated.",
        ge=1,
        metavar=TOKENS,
    )
    stop_votes: bool = option(
        False, "Stop once the vote is decided; needs --choose majority or weighted."
    )
    stop_confidence: float | None = option(
        None,
        "Stop after a --wave whose leading answer stays ahead with this probability "
        "(Adaptive-Consistency); needs --choose majority.",
        gt=0.5,
        lt=1,
        metavar="PROBABILITY",
    )
    first_k: int | None = option(None, "Stop once this many paths have finished.", ge=1)


class MemorySettings(Section):
    """The limit on all device memory (`--memory`), and limits on parts of it."""

    memory: units.Size = option(
        None, "Limit on all memory used on the device, such as 7GiB.", metavar="SIZE"
    )
    kv_memory: units.Size = option(
        None, "Memory for KV on the device (default: computed from --memory).", metavar="SIZE"
    )
    host_memory: units.Size = option(
        None, "Limit on KV in host memory (default: half; GPU: at most 16 GiB).", metavar="SIZE"
    )
    weights_home: Literal["auto", "device", "host", "disk"] = option(
        "auto",
        "Home of layers that do not fit in --memory; passes copy them to the device. auto: host "
        "for a GPU, disk for a CPU. device: refuse.",
    )
    split: units.Split = option(
        "auto",
        "How generator and verifier share KV memory: auto moves it to the model that needs it, "
        "SHARE fixes the generator's part.",
        metavar="auto|SHARE",
    )


class ScheduleSettings(ExtensibleSection):
    """How beams are arranged on the device. These settings change the time, never the tree.

    The one exception is `speculation="truncate"`: its tree differs, and depends on the timing.
    """

    schedule: str = option("auto", "How beams are arranged on the device.", metavar="NAME")
    planner: Literal["ranges", "greedy"] = option(
        "ranges", "Planner of groups: dynamic programming, or Algorithm 1 of LBS.", recipe_only=True
    )
    inter_beam: bool = option(
        True, "Move a prefix once for all beams that share it.", recipe_only=True
    )
    balance: bool = option(True, "Use as few groups as possible, of even size.", recipe_only=True)
    prefetch: bool = option(
        True, "Load the next group's KV while a group computes.", recipe_only=True
    )
    reuse: bool = option(True, "Keep KV on the device between steps.", recipe_only=True)
    evict: Literal["host", "recompute"] = option(
        "host", "Whether evicted KV is loaded from host memory or computed again."
    )
    link_bandwidth: units.Rate = option(
        None, "Throttle the link to this bandwidth (emulation).", metavar="SIZE/s"
    )
    max_batch: int | None = option(None, "Limit on beams decoded together.", ge=1, metavar="BEAMS")
    batching: Literal["auto", "continuous", "grouped"] = option(
        "auto",
        "Admit beams as blocks become free, preempting some when none is left (continuous), or in "
        "groups between barriers (grouped, as in LBS). auto: the faster one by estimate, and "
        "continuous without --step-tokens.",
    )
    explore: Explore = option(
        "continuous",
        "How problems in flight proceed: in step (lockstep, as in search-and-learn), each at its "
        "own pace (continuous), or admitted until the device is busy and scored together "
        "(decoupled).",
    )
    executor: Literal["auto", "plain", "overlapped"] = option(
        "auto",
        "Score and decode in turns (plain), or at the same time if several problems are in flight "
        "(overlapped). auto: the one that was faster in measurements.",
    )
    verifiers: int = option(
        1,
        "Verifier threads beside decoding, over one copy of the weights; each has its own problems "
        "and part of the KV.",
        ge=1,
        le=64,
    )
    speculation: Speculation = option(
        "auto",
        "Decode children of finished steps in idle slots, before selection. exact: same tree; "
        "truncate: siblings start with a part of one child's tokens (FlashTTS), another tree; "
        "auto: exact if it pays.",
    )
    truncation: float = option(
        0.85, "Mean share of tokens that speculation truncate keeps (FlashTTS's R).", ge=0, le=1.0,
        recipe_only=True,
    )  # fmt: skip
    drafts: units.Drafts = option(
        "off",
        "Limit on draft tokens per row, taken from the tree's text and verified in one pass: same "
        "tree, fewer passes. auto: as many as pay.",
        metavar="auto|off|TOKENS",
    )
    verify_ahead: Literal["slack", "never"] = option(
        "never",
        "When speculative steps are scored: once selected (never), or while the verifier is idle "
        "(slack, FlashTTS's LookAhead Verification).",
    )
    write_back: Literal["auto", "eager", "lazy"] = option(
        "auto",
        "When new KV is written to the host: once complete (eager), or before its memory is needed "
        "(lazy). auto: eager if a round needs 1.5 times the device's KV, if rows are preempted, "
        "or with a copy per beam.",
    )
    graphs: Literal["auto", "on", "off"] = option(
        "auto",
        "Run decode steps as CUDA graphs if kernels run (auto, on), or as plain calls (off).",
    )


class SparseSettings(Section):
    """Which tokens decoding attends to if paths are long. These settings change the tree."""

    sparse: str = option(
        "off",
        "Tokens that decoding attends to on long paths: all (off), the highest-scored (exact), "
        "the same within the best pages (pages), whole pages (quest), by the query of the layer "
        "before (ahead, ahead-pages), or by a predicted query (asyncspade). auto: exact with KV "
        "on the host if the cost model expects a gain, else off. Changes the tree.",
        metavar="METHOD",
    )
    select: units.Select = option(
        2048,
        "Tokens that --sparse selects per KV head: a number, all, or a share such as 1/8.",
        metavar="TOKENS|SHARE",
    )
    sparse_from: int = option(
        4096, "Path length up to which --sparse attends to all tokens.", ge=0, metavar=TOKENS
    )
    sparse_layers: int = option(
        0, "First layers that attend to all tokens with --sparse.", ge=0, metavar="LAYERS"
    )
    sparse_correct: float | None = option(
        None,
        "Least similarity of predicted and real query; below it a head uses the real one (FreeKV).",
        gt=-1.0,
        le=1.0,
        allow_inf_nan=False,
        metavar="COSINE",
    )
    sparse_home: Literal["device", "host"] = option(
        "device",
        "Where --sparse keeps all KV: on the device, or on the host with selected tokens on the "
        "device (--kv-memory). Same tree.",
    )

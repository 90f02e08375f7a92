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

# Limit on the candidates of a round and on the children of a step. Each has a node, a sampled
# token, a slot in a batch and some KB of host memory before its first token. Published repeated
# sampling goes up to 10,000 (arXiv 2407.21787).
MOST_CANDIDATES = 2**16

# Prefix of a generator's name if a server generates the steps (`remote`).
ELSEWHERE = "openai:"

# How problems in flight share the device, see `engine.queue` and `engine.engine`.
Explore = Literal["lockstep", "continuous", "decoupled"]

# Whether children of finished steps are decoded before selection has chosen among the steps.
Speculation = Literal["off", "exact", "truncate", "auto"]

# How a path's score follows from the scores of its steps, and how the answer is chosen.
Reduction = Literal["last", "min", "prod", "mean"]
AnswerChoice = Literal["best", "majority", "weighted"]

Weights = Literal["auto", "int8", "int4"]
KVDtype = Literal["auto", "int8", "fp8"]
DecoderChoice = Literal["auto", "own", "transformers"]
TOKENS = "TOKENS"


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OpenSection(Section):
    """A section that also accepts the options of a strategy, schedule or verifier that it names.

    These options are stored in `model_extra` by name. The package that declares the part checks
    them.
    """

    model_config = ConfigDict(frozen=True, extra="allow")


class ModelSettings(OpenSection):
    """Which models run, where, and in which precision; also the options of a declared verifier."""

    model: units.ModelText = option(
        "bundled",
        "Generator: PATH, bundled, bundled:strong, bundled:thinking, hf:ORG/NAME[@REVISION] or "
        "random:SHAPE; elsewhere: openai:URL#NAME (a server). "
        f'The bundled models know one kind of problem: "{GRAMMAR}"',
        metavar="MODEL",
    )
    verifier: units.TextOrNone = option(
        None,
        "What scores steps: PATH, family:NAME:PATH, judge:PATH, logprob, none, ... "
        "(default: bundled beside --model bundled, else none).",
        metavar="MODEL",
    )
    system_prompt: str | None = option(
        None,
        "System message of the chat template (default: to reason step by step and to put "
        r'the answer in \boxed{}; "" for none).',
    )
    chat_template: units.TextOrNone = option(None, "Jinja chat template, or a file that holds one.")
    template_args: units.TemplateArgs = option(
        {},
        """Arguments of the chat template, such as '{"enable_thinking": false}'.""",
        metavar="JSON",
    )
    tokenizer: units.TextOrNone = option(
        None, "openai:...: the tokenizer, PATH or hf:ORG/NAME (default: its name).", metavar="MODEL"
    )
    model_key: units.TextOrNone = option(
        None, "openai:...: a file that holds the server's API key.", metavar="FILE"
    )
    device: str = option("cpu", "Where the models run: cpu, cuda, cuda:1.")
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = option(
        "auto",
        "Precision of weights, activations and KV; auto on a CPU is float32, or bfloat16 for a "
        "checkpoint of 100 million parameters and more, where the CPU multiplies it exactly.",
    )
    decoder: DecoderChoice = option(
        "auto",
        "What runs the models' layers: own (dense families, fastest), transformers (any causal "
        "model whose attention goes through its interface); auto: own where it can.",
    )
    attention: Literal["auto", "reference", "dense", "tree", "triton-dense", "triton-tree"] = (
        option("auto", "How decoding attends to shared prefixes (tree, dense: kernels on a GPU).")
    )
    context: int | None = option(None, "Cap on the model's context.", ge=1, metavar=TOKENS)
    weights: Weights = option(
        "auto",
        "Keep the generator's weights so; auto is as a quantised file has them, else their dtype. "
        "int8 and int4 are faster on most CPUs.",
    )
    verifier_weights: Weights = option("auto", "The same for the verifier's.")
    kv_dtype: KVDtype = option(
        "auto",
        "Keep both models' KV in 8 bits, on the device, the host and the link: int8, or fp8 "
        "(float8_e4m3); auto: in their dtype. Changes the tree.",
    )
    deterministic: bool = option(
        False, "Compute in tiles of a fixed size: the same tree whatever the groups, on a GPU too."
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

        The bundled verifier was trained on the solutions of the bundled generators. It has never
        seen a thought, or an answer without steps, so it is not the default for `bundled:thinking`.
        """
        if self.is_random:
            return "logprob"
        return "bundled" if self.model in ("bundled", "bundled:strong") else "none"

    @property
    def scorer(self) -> str:
        """The verifier that the user named, or the default."""
        return self.default_verifier if self.verifier is None else self.verifier


class SamplingSettings(Section):
    """How a token is sampled from the logits."""

    temperature: float = option(0.8, "0 is greedy.", ge=0.0)
    top_p: float = option(1.0, "Keep the most likely tokens up to this probability.", gt=0, le=1.0)
    top_k: int | None = option(
        None, "Keep this many of the most likely tokens.", ge=1, le=2**31 - 1
    )
    min_p: float | None = option(
        None, "Drop tokens less likely than this share of the likeliest.", ge=0.0, le=1.0
    )
    top_logprobs: int = option(
        0, "Likeliest tokens to keep beside each one (Python, checkpoints).", ge=0, le=20
    )


class StepSettings(Section):
    """Where a step ends, and where a path ends."""

    delimiter: str = option(
        "\n\n", r"Text that ends a step; \n and \t are understood.", min_length=1
    )
    step_tokens: int | None = option(
        None, "Steps of this length, not the delimiter's.", ge=1, metavar=TOKENS
    )
    max_step_tokens: int = option(256, "Longest step.", ge=1, metavar=TOKENS)
    step_limits: units.StepLimits = option(
        None,
        "Longest first, second, ... step; the last stands for the rest.",
        min_length=1,
        metavar="TOKENS,...",
    )
    max_tokens: int | None = option(
        None, "Longest path after the prompt; revise: longest reply.", ge=1, metavar=TOKENS
    )
    thinking: units.Thinking = option(
        "auto",
        "Whether a model that can think does (on, off), and for how many tokens at most; auto: as "
        "its chat template has it.",
        metavar="auto|on|off|TOKENS",
    )
    now: units.Time = option(
        None,
        "Time that chat templates see, such as 2026-11-28 (default: of a template that reads it, "
        "when the search begins); part of receipts and checkpoints.",
        metavar="TIME",
    )
    soft_close: float = option(
        0.1,
        "In the last quarter of --thinking TOKENS a thought ends where its end is at least so "
        "likely; above 1: never before the last token.",
        gt=0.0,
        metavar="PROBABILITY",
    )
    close_message: units.CloseMessage = option(
        "", r"What a thought is made to say before it is closed; \n is understood.", metavar="TEXT"
    )
    thought_steps: units.ThoughtSteps = option(
        "auto",
        "Steps inside thoughts: whole, paragraphs, sentences, markers (Wait, Hmm, ...), or so many "
        "tokens; auto: whole where the verifier sees no thoughts, else as outside.",
        metavar="auto|whole|paragraphs|sentences|markers|TOKENS",
    )
    ignore_eos: bool = option(False, "Go on after the end-of-text token.")
    stop_strings: units.StopStrings = option(
        (),
        "A path ends, complete, where its reply holds this; its text ends before it. May be "
        r"given several times; \n and \t are understood.",
        max_length=16,
        metavar="TEXT",
    )

    @property
    def longest(self) -> int:
        """The largest number of tokens of a step."""
        return self.step_tokens or max(self.step_limits or (self.max_step_tokens,))


class SearchSettings(OpenSection):
    """Which strategy runs, how wide, how the answer is chosen; also the strategy's options."""

    search: str | None = option(
        None,
        "Strategy; list explains them all (default: beam; majority without a verifier).",
        metavar="NAME",
    )
    n: int = option(16, "Candidates per round.", ge=1, le=MOST_CANDIDATES)
    width: int = option(
        4, "Children per survivor; n / width survive a round.", ge=1, le=MOST_CANDIDATES
    )
    max_rounds: int = option(
        40, "Most rounds of a search; lookahead, mcts, deepconf: most steps of a path.", ge=1
    )
    filter_duplicates: bool = option(
        False, "Keep one of several candidates with the same text; dvts: in each subtree."
    )
    aggregate: Reduction | None = option(
        None, "From step scores to a path's score (default: the verifier's)."
    )
    verify_every: int = option(
        1,
        "Score every so manyth step of a path, and its last; the others go on by one child each.",
        ge=1,
        metavar="STEPS",
    )
    choose: AnswerChoice | None = option(
        None, "How the answer is chosen (default: the strategy's)."
    )
    answers: str = option(
        "math",
        "What of a reply is its answer, and when two are the same: math, code, or a plugin's.",
        metavar="NAME",
    )
    seed: int = option(0, "Seed of every random draw.", ge=0)


class StopSettings(Section):
    """Conditions that end a search early, with the best candidates so far.

    Until then the tree is the same as without them.
    """

    deadline: units.Duration = option(
        None,
        "Stop this long after the search starts or is resumed: 30s, 2m, 1h.",
        metavar="DURATION",
    )
    token_budget: int | None = option(
        None,
        "Stop once this many tokens are generated: looked at between rounds, so that the last one "
        "may go beyond.",
        ge=1,
        metavar=TOKENS,
    )
    stop_votes: bool = option(
        False, "Stop once the vote is settled; with --choose majority or weighted."
    )
    stop_confidence: float | None = option(
        None,
        "Stop behind a --wave whose leading answer is so likely to stay ahead of the next one "
        "(Adaptive-Consistency); with --choose majority.",
        gt=0.5,
        lt=1,
        metavar="PROBABILITY",
    )
    first_k: int | None = option(None, "Stop once so many paths have finished.", ge=1)


class MemorySettings(Section):
    """The one memory number, and parts of it that a user may set."""

    memory: units.Size = option(
        None, "All that may be used on the device, such as 7GiB.", metavar="SIZE"
    )
    kv_memory: units.Size = option(
        None, "Device KV cache alone; overrides the plan.", metavar="SIZE"
    )
    host_memory: units.Size = option(
        None, "Most KV in host memory (default: half of it; GPU: at most 16 GiB).", metavar="SIZE"
    )
    split: units.Split = option(
        "auto",
        "Who has the KV memory. auto: generator and verifier in turn get what they need, the "
        "other's KV leaving only where it is in the way; SHARE: the generator's, fixed.",
        metavar="SPLIT",
    )


class ScheduleSettings(OpenSection):
    """How beams are arranged on the device. These settings change the time, never the tree.

    The one exception is `speculation="truncate"`: its tree differs, and depends on the timing.
    """

    schedule: str = option("auto", "How beams are arranged on the device.", metavar="NAME")
    planner: Literal["ranges", "greedy"] = option(
        "ranges", "Groups by dynamic programming, or by LBS's Algorithm 1.", recipe_only=True
    )
    inter_beam: bool = option(True, "Beams that share a prefix move it once.", recipe_only=True)
    balance: bool = option(True, "Groups of even size, as few as possible.", recipe_only=True)
    prefetch: bool = option(True, "Load a group's KV while one computes.", recipe_only=True)
    reuse: bool = option(True, "Keep what is on the device between steps.", recipe_only=True)
    evict: Literal["host", "recompute"] = option(
        "host", "Evicted KV comes back from host memory, or is computed again."
    )
    link_bandwidth: units.Rate = option(
        None, "Throttle the link to this rate (emulated).", metavar="SIZE/s"
    )
    max_batch: int | None = option(None, "Most beams decoded together.", ge=1, metavar="BEAMS")
    batching: Literal["auto", "continuous", "grouped"] = option(
        "auto",
        "Beams join as soon as there is room, and wait on the host where it ends (continuous), or "
        "group by group behind barriers (grouped, the LBS paper); auto: whichever is expected to "
        "be faster in each round; continuous where steps have no fixed length.",
    )
    explore: Explore = option(
        "continuous",
        "Several problems in flight: all decode, are scored and decide together (lockstep, as in "
        "search-and-learn), each goes at its own pace (continuous), or problems are taken in "
        "until the device is busy, and scored together (decoupled).",
    )
    executor: Literal["auto", "plain", "overlapped"] = option(
        "auto",
        "Score and decode in turns (plain), or at the same time where several problems are in "
        "flight (overlapped); auto: what was measured to be faster.",
    )
    verifiers: int = option(
        1,
        "Verifiers that score beside decoding, over one copy of the weights: each has a thread, "
        "its part of the verifier's KV, and problems of its own.",
        ge=1,
        le=64,
    )
    speculation: Speculation = option(
        "auto",
        "Decode children of complete steps in slots that nobody waits for, before selection has "
        "chosen among those steps (exact: the tree is the same; truncate: it is not, as in "
        "FlashTTS siblings begin with a part of what one of them has); auto: exact where it pays.",
    )
    truncation: float = option(
        0.85, "Mean share of a sibling that copies keep (truncate; FlashTTS's R).", ge=0.0, le=1.0,
        recipe_only=True,
    )  # fmt: skip
    drafts: units.Drafts = option(
        "off",
        "Tokens a row, at most, to guess from the tree's own text and to verify in one pass: the "
        "same tree in fewer passes. auto: as many as pay, by what passes take and guesses hold.",
        metavar="auto|off|TOKENS",
    )
    verify_ahead: Literal["slack", "never"] = option(
        "never",
        "Steps that were decoded ahead are scored once they are chosen (never), or at once, "
        "while the verifier has nothing else (slack: FlashTTS's LookAhead Verification).",
    )
    write_back: Literal["auto", "eager", "lazy"] = option(
        "auto",
        "Send new KV to the host as soon as it is whole (eager), or shortly before its room is "
        "needed (lazy: most of what is pruned never goes); auto: eager where a step needs half as "
        "much again as the device, where rows park, or with a copy per beam.",
    )
    graphs: Literal["auto", "on", "off"] = option(
        "auto", "Decode steps as CUDA graphs where kernels run (auto, on), or as plain calls (off)."
    )


class SparseSettings(Section):
    """Which tokens decoding attends to if paths are long. These settings change the tree."""

    sparse: str = option(
        "off",
        "Which tokens decoding attends to where paths are long: all (off), those with the "
        "largest scores (exact), the same among the best pages (pages), whole pages (quest), by "
        "the query of the layer before (ahead, ahead-pages), or by one predicted from earlier "
        "tokens (asyncspade; -printed, -ridge: other readings of it). auto: exact with KV at "
        "home on the host where that gains by the cost model, else off. Changes the tree.",
        metavar="METHOD",
    )
    select: units.Select = option(
        2048,
        "Tokens that --sparse selects for each KV head: a number, all, or a share such as 1/8.",
        metavar="TOKENS|SHARE",
    )
    sparse_from: int = option(
        4096, "Up to a path of so many tokens --sparse reads all.", ge=0, metavar=TOKENS
    )
    sparse_layers: int = option(
        0, "First layers that read all with --sparse.", ge=0, metavar="LAYERS"
    )
    sparse_correct: float | None = option(
        None,
        "A head whose query is less like the predicted one selects by its own (FreeKV).",
        gt=-1.0,
        le=1.0,
        allow_inf_nan=False,
        metavar="COSINE",
    )
    sparse_home: Literal["device", "host"] = option(
        "device",
        "Where all KV is with --sparse: on the device, or on the host, the device having "
        "what is selected (--kv-memory). The same tree.",
    )

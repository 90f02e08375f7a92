"""The settings, each said once: type, default, range, help, and what its value is called.

A section is a frozen pydantic model that rejects unknown keys. The command line, recipes, the
options of `Solver` with their types, the server's requests and the reference follow from it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from beamwright.registry import option
from beamwright.units import (
    Duration,
    Names,
    Rate,
    Select,
    Size,
    Split,
    StepLimits,
    StopStrings,
    Text,
    TextOrNone,
)

GRAMMAR = "NAME has N THINGS. In MONTH NAME gets N THINGS. ... How many THINGS does NAME have now?"
"""The one kind of problem that the bundled models know."""

MOST_CANDIDATES = 2**16
"""Most candidates, and most children of a step: each has a node, a draw and a place in a batch.

Some KB of host memory each before the first token. Repeated sampling goes to 10,000 samples
(arXiv 2407.21787).
"""


ELSEWHERE = ("openai:", "vllm:")
"""What names of generators begin with that a server, or an engine of its own, runs (`remote`)."""


Explore = Literal["lockstep", "continuous", "decoupled"]
"""How several problems in flight share the device, see `engine.admission` and `engine.engine`."""


Speculation = Literal["off", "exact", "truncate", "auto"]
"""Whether children of finished steps are decoded before selection has chosen among those."""


Sparse = Literal["off", "exact", "pages", "quest", "ahead", "ahead-pages", "asyncspade"]
"""Which tokens of a long path decoding attends to, see `sparse.rule`."""


Victims = Literal["tree", "lru", "cost"]
"""Whose KV leaves the device first, see `schedule.eviction`."""


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OpenSection(Section):
    """A section that also holds options of what it names; the room that declares them checks them.

    They are in `model_extra`, under their names.
    """

    model_config = ConfigDict(frozen=True, extra="allow")


class ModelSettings(OpenSection):
    """Which models run, where and in what precision; options of a declared verifier."""

    model: Text = option(
        "bundled",
        also="generator llm",
        common=True,
        metavar="MODEL",
        help="Generator: PATH, bundled, bundled:strong, hf:ORG/NAME[@REVISION] or random:SHAPE; "
        "elsewhere: openai:URL#NAME (a server), vllm:PATH (vLLM, in this process). The bundled "
        f'models know one kind of problem: "{GRAMMAR}"',
    )
    verifier: TextOrNone = option(
        None,
        also="prm reward scorer judge",
        common=True,
        metavar="MODEL",
        help="What scores steps: PATH, family:NAME:PATH, judge:PATH, logprob, none, ... "
        "(default: bundled beside --model bundled, else none).",
    )
    system_prompt: str | None = option(
        None,
        help="System message of the chat template (default: to reason step by step and to put "
        r'the answer in \boxed{}; "" for none).',
    )
    chat_template: TextOrNone = option(None, help="Jinja chat template, or a file that holds one.")
    tokenizer: TextOrNone = option(
        None,
        metavar="MODEL",
        help="openai:...: the model's tokenizer, PATH, hf:ORG/NAME or bundled (default: its name).",
    )
    model_key: TextOrNone = option(
        None, metavar="FILE", help="openai:...: a file that holds the server's API key."
    )
    device: str = option(
        "cpu", also="cuda cpu gpu", common=True, help="Where the models run: cpu, cuda, cuda:1."
    )
    verifier_device: str | None = option(
        None,
        help="Where the verifier runs, apart from the generator: --memory is then of each "
        "(default: beside it).",
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = option(
        "auto",
        also="precision float",
        help="Precision of weights, activations and KV; auto on a CPU is float32, or bfloat16 "
        "for a checkpoint of 100 million parameters and more in it, where the CPU multiplies it "
        "exactly.",
    )
    attention: Literal["auto", "reference", "dense", "tree", "triton-dense", "triton-tree"] = (
        option(
            "auto",
            help="How decoding attends to shared prefixes; tree and dense run kernels on a GPU.",
        )
    )
    context: int | None = option(
        None,
        also="ctx ctx-size max-model-len",
        ge=1,
        metavar="TOKENS",
        help="Cap on the model's context.",
    )
    weights: Literal["auto", "int8", "int4"] = option(
        "auto",
        also="quantize quantization int8 int4 bits",
        common=True,
        help="Keep the generator's weights so; auto is their dtype. int8 is faster on most CPUs, "
        "int4 saves memory only.",
    )
    verifier_weights: Literal["auto", "int8", "int4"] = option(
        "auto", help="The same for the verifier's."
    )
    deterministic: bool = option(
        False,
        help="Compute in tiles of a fixed size: the same tree whatever the groups, on a GPU too.",
    )

    @property
    def is_random(self) -> bool:
        """The model is a shape with random weights, there to be measured."""
        return self.model.startswith("random:")

    @property
    def runs_elsewhere(self) -> bool:
        """The generator is a server's, or an engine's of its own (`remote`)."""
        return self.model.startswith(ELSEWHERE)

    @property
    def default_verifier(self) -> str:
        """What scores steps where none is given: the bundled one knows the bundled models."""
        if self.is_random:
            return "logprob"
        return "bundled" if self.model.partition(":")[0] == "bundled" else "none"

    @property
    def scorer(self) -> str:
        """The verifier, given or default."""
        return self.default_verifier if self.verifier is None else self.verifier


class SamplingSettings(Section):
    """How one token is drawn from the logits."""

    temperature: float = option(0.8, also="temp", common=True, ge=0.0, help="0 is greedy.")
    top_p: float = option(
        1.0, gt=0.0, le=1.0, help="Keep the most likely tokens up to this probability."
    )
    top_k: int | None = option(
        None, ge=1, le=2**31 - 1, help="Keep this many of the most likely tokens."
    )
    min_p: float | None = option(
        None, ge=0.0, le=1.0, help="Drop tokens less likely than this share of the likeliest."
    )
    top_logprobs: int = option(
        0, ge=0, le=20, help="Likeliest tokens to keep beside each one (Python, checkpoints)."
    )


class StepSettings(Section):
    """Where a step, and a path, ends."""

    delimiter: str = option(
        "\n\n", min_length=1, help=r"Text that ends a step; \n and \t are understood."
    )
    step_tokens: int | None = option(
        None,
        also="step",
        ge=1,
        metavar="TOKENS",
        help="Steps of this fixed length instead of the delimiter.",
    )
    max_step_tokens: int = option(256, ge=1, metavar="TOKENS", help="Longest step.")
    step_limits: StepLimits = option(
        None,
        min_length=1,
        metavar="TOKENS,...",
        help="Longest first, second, ... step; the last stands for the rest.",
    )
    max_tokens: int | None = option(
        None,
        also="max-new-tokens length tokens",
        common=True,
        ge=1,
        metavar="TOKENS",
        help="Longest path after the prompt; revise: longest reply.",
    )
    ignore_eos: bool = option(False, help="Go on after the end-of-text token.")
    stop_strings: StopStrings = option(
        (),
        also="stop-string",
        common=True,
        max_length=16,
        metavar="TEXT",
        help="A path ends, complete, where its reply holds this; its text ends before it. May be "
        r"given several times; \n and \t are understood.",
    )


class SearchSettings(OpenSection):
    """Which strategy, how wide, and how the final answer is chosen; options of the strategy."""

    search: str | None = option(
        None,
        also="strategy method algorithm",
        common=True,
        metavar="NAME",
        help="Strategy; list explains them all (default: beam; majority where there is no "
        "verifier).",
    )
    n: int = option(
        16,
        also="beam beams samples candidates best-of num-samples",
        common=True,
        ge=1,
        le=MOST_CANDIDATES,
        help="Candidates per round.",
    )
    width: int = option(
        4,
        also="beam branch branching",
        common=True,
        ge=1,
        le=MOST_CANDIDATES,
        help="Children per survivor; n / width survive a round.",
    )
    max_rounds: int = option(
        40, ge=1, help="Most rounds of a search; lookahead, mcts, deepconf: most steps of a path."
    )
    filter_duplicates: bool = option(
        False, help="Keep one of several candidates with the same text."
    )
    aggregate: Literal["last", "min", "prod", "mean"] | None = option(
        None, help="From step scores to a path's score (default: the verifier's)."
    )
    choose: Literal["best", "majority", "weighted"] | None = option(
        None, help="How the final answer is chosen (default: the strategy's own)."
    )
    seed: int = option(0, also="random", common=True, ge=0, help="Seed of every random draw.")


class StopSettings(OpenSection):
    """What ends a search early, with the best so far. The tree up to there is the same.

    stop: names of declared stops, whose options are beside it.
    """

    deadline: Duration = option(
        None,
        also="timeout time",
        common=True,
        metavar="DURATION",
        help="Stop this long after the search starts or is resumed: 30s, 2m, 1h.",
    )
    token_budget: int | None = option(
        None, ge=1, metavar="TOKENS", help="Stop once this many tokens are generated."
    )
    stop_votes: bool = option(
        False, help="Stop once the vote is settled; with --choose majority or weighted."
    )
    stop_score: float | None = option(
        None,
        allow_inf_nan=False,
        metavar="SCORE",
        help="Stop once a finished candidate scores at least this.",
    )
    stop: Names = option(
        None, metavar="NAME,...", help="Stop where these say so, which a --plugin declares."
    )


class MemorySettings(Section):
    """One memory number, and its parts where a user wants to name them."""

    memory: Size = option(
        None,
        also="vram gpu ram",
        common=True,
        metavar="SIZE",
        help="All that may be used on the device, such as 7GiB.",
    )
    kv_memory: Size = option(
        None,
        also="kv cache kv-cache gpu-memory-utilization",
        common=True,
        metavar="SIZE",
        help="Device KV cache alone; overrides the plan.",
    )
    host_memory: Size = option(
        None,
        metavar="SIZE",
        help="Most KV kept in host memory (default: half of it; for a GPU at most 16 GiB).",
    )
    split: Split = option(
        "auto",
        metavar="SPLIT",
        help="Who has the KV memory. auto: generator and verifier in turn get what they need, "
        "the other's KV leaving only where it is in the way; roofline: FlashTTS's search over "
        "batch sizes before every round; offload: everything in turn; SHARE: the generator's, "
        "fixed.",
    )


class ScheduleSettings(OpenSection):
    """How beams are arranged on the device: the time, and never the tree, but for one value.

    `speculation="truncate"` grows another tree, which depends on the time.
    """

    schedule: str = option("auto", metavar="NAME", help="How beams are arranged on the device.")
    planner: Literal["ranges", "greedy"] = option(
        "ranges",
        recipe_only=True,
        help="Groups by dynamic programming over ranges, or by LBS's Algorithm 1.",
    )
    inter_beam: bool = option(
        True, recipe_only=True, help="Group beams that share a prefix, and move the prefix once."
    )
    balance: bool = option(True, recipe_only=True, help="Groups of even size, as few as possible.")
    prefetch: bool = option(
        True, recipe_only=True, help="Load the next group's KV while a group computes."
    )
    reuse: bool = option(
        True, recipe_only=True, help="Keep what is on the device from one step to the next."
    )
    evict: Literal["host", "recompute"] = option(
        "host", help="Evicted KV comes back from host memory, or is computed again."
    )
    victims: Victims = option(
        "tree",
        recipe_only=True,
        help="Whose KV leaves the device first: what the round does not use, then what it uses "
        "last (tree); least recently used, deepest first (lru, as vLLM); what the round does not "
        "use, then what is cheapest to bring back (cost).",
    )
    link_bandwidth: Rate = option(
        None,
        also="pcie bandwidth link",
        metavar="SIZE/s",
        help="Throttle the link to this rate (emulated).",
    )
    max_batch: int | None = option(
        None, also="batch batch-size", ge=1, metavar="BEAMS", help="Most beams decoded together."
    )
    batching: Literal["auto", "continuous", "grouped"] = option(
        "auto",
        help="Beams join as soon as there is room (continuous), or group by group behind "
        "barriers (grouped, the LBS paper); auto: barriers where the tree outgrows the device "
        "and steps have a fixed length.",
    )
    explore: Explore = option(
        "continuous",
        help="Several problems in flight: all decode, are scored and decide together (lockstep, "
        "as in search-and-learn), each goes at its own pace (continuous), or problems are taken "
        "in until the device is busy, and scored together (decoupled).",
    )
    min_problems: int | None = option(
        None,
        ge=1,
        metavar="N",
        help="Others begin only when fewer problems are in flight (default: at once; in lockstep "
        "when all have ended).",
    )
    executor: Literal["auto", "plain", "overlapped"] = option(
        "auto",
        help="Score and decode in turns (plain), or at the same time where several problems are "
        "in flight (overlapped); auto: what is measured to be faster.",
    )
    speculation: Speculation = option(
        "auto",
        help="Decode children of complete steps in slots that nobody waits for, before selection "
        "has chosen among those steps (exact: the tree is the same; truncate: it is not, as in "
        "FlashTTS siblings begin with a part of what one of them has); auto: exact where it pays.",
    )
    verify_ahead: Literal["slack", "never"] = option(
        "never",
        help="Steps that were decoded ahead are scored once they are chosen (never), or at once, "
        "while the verifier has nothing else (slack: FlashTTS's LookAhead Verification).",
    )
    write_back: Literal["auto", "eager", "lazy"] = option(
        "auto",
        help="Send new KV to the host as soon as it is whole (eager), or shortly before its room "
        "is needed, what is stored already leaving first (lazy: most of what is pruned never "
        "goes); auto: eager where a step needs more than twice the device, or a copy per beam.",
    )
    graphs: Literal["auto", "on", "off"] = option(
        "auto",
        help="Decode steps as CUDA graphs where kernels run (auto, on), or as plain calls (off).",
    )


class SparseSettings(Section):
    """Which tokens decoding attends to where paths are long. Changes the tree."""

    sparse: Sparse = option(
        "off",
        help="Which tokens decoding attends to where paths are long: all (off), those with the "
        "largest scores (exact), the same among the best pages (pages), whole pages (quest), by "
        "the query of the layer before (ahead, ahead-pages), or by one predicted from earlier "
        "tokens (asyncspade). Changes the tree.",
    )
    select: Select = option(
        2048,
        metavar="TOKENS|SHARE",
        help="Tokens that --sparse selects for each KV head: a number, all, or a share such as "
        "1/8.",
    )
    sparse_from: int = option(
        4096, ge=0, metavar="TOKENS", help="Up to a path of so many tokens --sparse reads all."
    )
    sparse_layers: int = option(
        0, ge=0, metavar="LAYERS", help="First layers that read all with --sparse."
    )
    sparse_correct: float | None = option(
        None,
        gt=-1.0,
        le=1.0,
        allow_inf_nan=False,
        metavar="COSINE",
        help="A head whose query is less like the predicted one selects by its own (FreeKV).",
    )
    sparse_home: Literal["device", "host"] = option(
        "device",
        help="Where all KV is with --sparse: on the device, or on the host, the device having "
        "what is selected (--kv-memory). The same tree.",
    )

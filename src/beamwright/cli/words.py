"""What the command line says of each setting: its metavar, None for its type's, and its help."""

from __future__ import annotations

from beamwright.search.doubts import GRAMMAR

SPLIT = "SPLIT"
SELECT = "TOKENS|SHARE"
TEXTS = "TEXT"  # given once for each

WORDS: dict[str, tuple[str | None, str]] = {
    "model": (
        "MODEL",
        "Generator: PATH, bundled, bundled:strong, hf:ORG/NAME[@REVISION] or random:SHAPE; "
        "elsewhere: openai:URL#NAME (a server), vllm:PATH (vLLM, in this process). The bundled "
        f'models know one kind of problem: "{GRAMMAR}"',
    ),
    "verifier": (
        "MODEL",
        "What scores steps: PATH, family:NAME:PATH, judge:PATH, logprob, none, ... "
        "(default: bundled beside --model bundled, else none).",
    ),
    "system_prompt": (
        None,
        r"System message of the chat template (default: to reason step by step and to put the "
        r'answer in \boxed{}; "" for none).',
    ),
    "chat_template": (None, "Jinja chat template, or a file that holds one."),
    "tokenizer": (
        "MODEL",
        "openai:...: the model's tokenizer, PATH, hf:ORG/NAME or bundled (default: its name).",
    ),
    "model_key": ("FILE", "openai:...: a file that holds the server's API key."),
    "device": (None, "Where the models run: cpu, cuda, cuda:1."),
    "verifier_device": (
        None,
        "Where the verifier runs, apart from the generator: --memory is then of each (default: "
        "beside it).",
    ),
    "dtype": (
        None,
        "Precision of weights, activations and KV; auto on a CPU is float32, or bfloat16 for a "
        "checkpoint of 100 million parameters and more in it, where the CPU multiplies it exactly.",
    ),
    "attention": (
        None,
        "How decoding attends to shared prefixes; tree and dense run kernels on a GPU.",
    ),
    "context": ("TOKENS", "Cap on the model's context."),
    "weights": (
        None,
        "Keep the generator's weights so; auto is their dtype. int8 is faster on most CPUs, int4 "
        "saves memory only.",
    ),
    "verifier_weights": (None, "The same for the verifier's."),
    "deterministic": (
        None,
        "Compute in tiles of a fixed size: the same tree whatever the groups, on a GPU too.",
    ),
    "temperature": (None, "0 is greedy."),
    "top_p": (None, "Keep the most likely tokens up to this probability."),
    "top_k": (None, "Keep this many of the most likely tokens."),
    "min_p": (None, "Drop tokens less likely than this share of the likeliest."),
    "top_logprobs": (None, "Likeliest tokens to keep beside each one (Python, checkpoints)."),
    "delimiter": (None, r"Text that ends a step; \n and \t are understood."),
    "step_tokens": ("TOKENS", "Steps of this fixed length instead of the delimiter."),
    "max_step_tokens": ("TOKENS", "Longest step."),
    "step_limits": (
        "TOKENS,...",
        "Longest first, second, ... step; the last stands for the rest.",
    ),
    "max_tokens": ("TOKENS", "Longest path after the prompt; revise: longest reply."),
    "ignore_eos": (None, "Go on after the end-of-text token."),
    "stop_strings": (
        TEXTS,
        "A path ends, complete, where its reply holds this; its text ends before it. May be given "
        r"several times; \n and \t are understood.",
    ),
    "search": (
        "NAME",
        "Strategy; list explains them all (default: beam; majority where there is no verifier).",
    ),
    "n": (None, "Candidates per round."),
    "width": (None, "Children per survivor; n / width survive a round."),
    "max_rounds": (
        None,
        "Most rounds of a search; lookahead, mcts, deepconf: most steps of a path.",
    ),
    "filter_duplicates": (None, "Keep one of several candidates with the same text."),
    "aggregate": (None, "From step scores to a path's score (default: the verifier's)."),
    "choose": (None, "How the final answer is chosen (default: the strategy's own)."),
    "compat": (None, "beam: another project's rules of selection, replication and padding."),
    "seed": (None, "Seed of every random draw."),
    "deadline": (
        "DURATION",
        "Stop this long after the search starts or is resumed: 30s, 2m, 1h.",
    ),
    "token_budget": ("TOKENS", "Stop once this many tokens are generated."),
    "stop_votes": (None, "Stop once the vote is settled; with --choose majority or weighted."),
    "stop_score": ("SCORE", "Stop once a finished candidate scores at least this."),
    "stop": ("NAME,...", "Stop where these say so, which a --plugin declares."),
    "memory": ("SIZE", "All that may be used on the device, such as 7GiB."),
    "kv_memory": ("SIZE", "Device KV cache alone; overrides the plan."),
    "host_memory": (
        "SIZE",
        "Most KV kept in host memory (default: half of it; for a GPU at most 16 GiB).",
    ),
    "split": (
        SPLIT,
        "Who has the KV memory. auto: generator and verifier in turn get what they need, the "
        "other's KV leaving only where it is in the way; roofline: FlashTTS's search over batch "
        "sizes before every round; offload: everything in turn; SHARE: the generator's, fixed.",
    ),
    "schedule": ("NAME", "How beams are arranged on the device."),
    "planner": (None, "Groups by dynamic programming over ranges, or by LBS's Algorithm 1."),
    "inter_beam": (None, "Group beams that share a prefix, and move the prefix once."),
    "balance": (None, "Groups of even size, as few as possible."),
    "prefetch": (None, "Load the next group's KV while a group computes."),
    "reuse": (None, "Keep what is on the device from one step to the next."),
    "evict": (None, "Evicted KV comes back from host memory, or is computed again."),
    "victims": (
        None,
        "Whose KV leaves the device first: what the round does not use, then what it uses last "
        "(tree); least recently used, deepest first (lru, as vLLM); what the round does not use, "
        "then what is cheapest to bring back (cost).",
    ),
    "link_bandwidth": ("SIZE/s", "Throttle the link to this rate (emulated)."),
    "max_batch": ("BEAMS", "Most beams decoded together."),
    "batching": (
        None,
        "Beams join as soon as there is room (continuous), or group by group behind barriers "
        "(grouped, the LBS paper); auto: barriers where the tree outgrows the device and "
        "steps have a fixed length.",
    ),
    "explore": (
        None,
        "Several problems in flight: all decode, are scored and decide together (lockstep, as in "
        "search-and-learn), each goes at its own pace (continuous), or problems are taken in until "
        "the device is busy, and scored together (decoupled).",
    ),
    "min_problems": (
        "N",
        "Others begin only when fewer problems are in flight (default: at once; in lockstep when "
        "all have ended).",
    ),
    "executor": (
        None,
        "Score and decode in turns (plain), or at the same time where several problems are in "
        "flight (overlapped); auto: what is measured to be faster.",
    ),
    "speculation": (
        None,
        "Decode children of complete steps in slots that nobody waits for, before selection has "
        "chosen among those steps (exact: the tree is the same; truncate: it is not, as in "
        "FlashTTS siblings begin with a part of what one of them has); auto: exact where it pays.",
    ),
    "verify_ahead": (
        None,
        "Steps that were decoded ahead are scored once they are chosen (never), or at once, while "
        "the verifier has nothing else (slack: FlashTTS's LookAhead Verification).",
    ),
    "write_back": (
        None,
        "Send new KV to the host as soon as it is whole (eager), or shortly before its room is "
        "needed, what is stored already leaving first (lazy: most of what is pruned never goes); "
        "auto: eager where a step needs more than twice the device, or a copy per beam.",
    ),
    "score_cache": (
        "FILE",
        "Keep the verifier's scores in this file, or for as long as the solver lives (memory): "
        "steps that were scored before are not scored again. The same scores.",
    ),
    "graphs": (
        None,
        "Decode steps as CUDA graphs where kernels run (auto, on), or as plain calls (off).",
    ),
    "sparse": (
        None,
        "Which tokens decoding attends to where paths are long: all (off), those with the largest "
        "scores (exact), the same among the best pages (pages), whole pages (quest), without what "
        "was not selected before (tova), by the query of the layer before (ahead, ahead-pages), by "
        "one predicted from earlier tokens (asyncspade, algorithm-1, harmonic, last), or the "
        "newest (window); auto: ahead, corrected, where that would pay. Changes the tree.",
    ),
    "select": (
        SELECT,
        "Tokens that --sparse selects for each KV head: a number, all, or a share such as 1/8.",
    ),
    "sparse_from": ("TOKENS", "Up to a path of so many tokens --sparse reads all."),
    "sparse_layers": ("LAYERS", "First layers that read all with --sparse."),
    "sparse_lag": ("TOKENS", "How far ahead asyncspade and its like predict."),
    "sparse_window": ("TOKENS", "Queries that they predict from."),
    "sparse_frame": (None, "Queries are predicted behind rotary positions, or before (pre)."),
    "sparse_correct": (
        "COSINE",
        "A head whose query is less like the predicted one selects by its own (FreeKV).",
    ),
    "sparse_home": (
        None,
        "Where all KV is with --sparse: on the device, or on the host, the device having what is "
        "selected (--kv-memory). The same tree.",
    ),
    "sparse_rank": (
        None,
        "Who finds what is selected by a query that is foreseen: the decoding thread (inline) or "
        "one beside it; auto: a thread where KV is on the host. The same tree.",
    ),
    "late": (
        None,
        "Where a thread has not yet found what a layer reads: wait, or read what the token before "
        "did (previous), so that timing chooses tokens.",
    ),
}

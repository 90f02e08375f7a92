"""Small stand-ins: tokenizers, checkpoints, a scripted executor, verifier and strategy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from beamwright.models.token_files import from_transformers_tokenizer
from beamwright.models.tokenizer import TextCodec
from beamwright.protocols import Plan, ScheduleView, StepDecoded, StepScored, StepWriter
from beamwright.tree import SearchTree, StopReason

# --- tokenizers and checkpoints --------------------------------------------------------------

SPECIAL = ["<pad>", "<bos>", "<eos>"]
LETTERS = [*(chr(code) for code in range(33, 127)), "Ġ", "Ċ"]  # printable ASCII, blank, newline
MERGES = [("Ċ", "Ċ"), (".", "ĊĊ"), ("Ċ", "a"), ("t", "h"), ("th", "e"), ("e", "Ġ"), ("1", "2")]
VOCAB = len(SPECIAL) + len(LETTERS) + len(MERGES)

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def merges_after_e():
    """Merges that join an "e" with the character behind it."""
    return [("e", chr(code)) for code in range(ord("a"), ord("z") + 1)] + [("e", "Ġ"), ("Ċ", "Ċ")]


def byte_level_bpe(merges=MERGES, letters=LETTERS):
    pieces = [*SPECIAL, *letters, *(left + right for left, right in merges)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def wrap(tokenizer, **options):
    """The `transformers` tokenizer over a bare one."""
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **options)


def codec_of(loaded):
    """The codec of a tokenizer of `transformers`."""
    tokenizer, special_tokens, chat_template, *_ = from_transformers_tokenizer(loaded)
    return TextCodec(tokenizer, frozenset(), special_tokens, chat_template)


def write_tokenizer(folder, merges=MERGES, **options):
    """Write a byte-level tokenizer into a folder; returns its size."""
    wrapped = wrap(byte_level_bpe(merges), **options)
    wrapped.save_pretrained(folder)
    return len(wrapped)


def write_checkpoint(folder, config, seed=0, noise=0.05, kind=AutoModelForCausalLM, **save_options):
    """A random checkpoint written by `transformers`; no weight stays at its initial 0 or 1."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)  # the initial weights are drawn from the global generator
        model = kind.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=noise)
    model.save_pretrained(folder, **save_options)
    return model.eval()


def change_json(file, **keys):
    """Set keys of a JSON file, which need not be there."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **keys}))


def change_tensors(folder, change):
    """Write what `change` makes of a checkpoint's tensors, or has made in them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors) or tensors, file, metadata={"format": "pt"})


def write_logit_pair_spec(folder):
    """A PRM in Math-Shepherd's manner: two rows of the LM head, read at a marker."""
    (folder / "verifier.yaml").write_text(
        "name: tiny\n"
        'template: {prefix: "<bos>{problem}\\n\\n", step_suffix: " #\\n", marker: "#"}\n'
        "read: marker\n"
        'head: {kind: logit_pair, good: "+", bad: "-"}\n'
        "activation: softmax\n"
        "aggregate: min\n"
    )


# --- trees -----------------------------------------------------------------------------------


def add_step(tree, node, text, tokens=(7,), stop=StopReason.DELIMITER):
    """Write a step of this text into an open node, and keep it."""
    parent = node.parent.text
    tree.commit(node, tuple(tokens), (-0.5,) * len(tokens), stop, parent + text)
    return node


def grow(tree, node, texts, stop=StopReason.DELIMITER):
    """Children of `node` with these step texts; they are left as candidates."""
    return [
        add_step(tree, child, text, stop=stop)
        for child, text in zip(tree.expand(node, len(texts)), texts, strict=True)
    ]


# --- scripted loop parts ---------------------------------------------------------------------


@dataclass
class ScriptedExecutor(StepWriter):
    """Writes the tokens, stops and scores that a function of the node says.

    script: node -> (stop, score). Remembers what it was asked to do and what was released.
    """

    script: Callable
    groups: list = field(default_factory=list)
    scored: list = field(default_factory=list)
    released: list = field(default_factory=list)
    cancelled: list = field(default_factory=list)
    queue: list = field(default_factory=list)
    unscored: list = field(default_factory=list)
    running_nodes: tuple = ()
    scores_patience_s: float | None = None

    @property
    def writer(self):
        return self

    @property
    def busy(self):
        return bool(self.queue)

    def submit(self, plan):
        self.queue = list(plan.groups)

    def verify(self, nodes, priority=0):
        if nodes:
            self.unscored.append(nodes)

    def wait(self):
        """Scores first, else one group."""
        if self.unscored:
            nodes = self.unscored.pop(0)
            self.scored.append(nodes)
            return [StepScored(node, self.script(node)[1]) for node in nodes]
        if not self.queue:
            return []
        group = self.queue.pop(0)
        self.groups.append(group)
        return [self._step(node) for node in group]

    def cancel(self, nodes):
        self.cancelled.extend(nodes)
        self.queue = [tuple(n for n in group if n not in nodes) for group in self.queue]
        self.queue = [group for group in self.queue if group]

    def view(self, beams):
        return ScheduleView(beams)

    def release(self, nodes):
        self.released.extend(nodes)

    def close(self):
        pass

    def _step(self, node):
        text = f"{node.text}[{node.lineage[-1]}]"
        return StepDecoded(node, (node.depth, 9), (-0.1, -0.2), self.script(node)[0], text)


@dataclass
class Grouping:
    """A schedule for tests: groups of a size, in depth-first or reversed order."""

    size: int | None = None
    reverse: bool = False
    name: str = "test"

    def plan(self, view):
        beams: Sequence = view.beams[::-1] if self.reverse else view.beams
        size = self.size or max(1, len(beams))
        return Plan(tuple(beams[i : i + size] for i in range(0, len(beams), size)))


def new_tree(problem_id=0, num_prompt_tokens=3, text="What is 1+1?"):
    return SearchTree(problem_id, tuple(range(10, 10 + num_prompt_tokens)), text)


def whole_numbers(*size, dtype, device):
    """-1, 0 and 1: their sums are exact in any order, and in 16 bits."""
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randint(-1, 2, size, generator=generator).to(device, dtype)

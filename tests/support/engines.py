"""Small real engines, and what must hold of them after every round."""

from functools import cache

import pytest
import torch

import fakes
from beamwright import Solver
from beamwright.attention import make_attention
from beamwright.checks.machine import run_selftest
from beamwright.models.dense import DenseDecoder
from beamwright.models.named import shape_from_text
from beamwright.models.prefill import PrefillRequest
from beamwright.models.tree_model import TreeModel
from beamwright.models.weights import keep_unchanged, random_weights
from beamwright.plan.costs import Storage
from beamwright.schedule import SCHEDULES

WAYS = (
    {"temperature": 0},
    {"top_logprobs": 3, "verifier": "entropy"},
    {"stop_strings": ("x", "Zq", "7")},
    {"ignore_eos": True, "step_tokens": 11},
    {"search": "lookahead", "n": 4},
    {"deterministic": True},
    {"context": 64, "max_tokens": None},
    {"speculation": "exact", "max_batch": 3},
)
"""Options by which rows are drawn, and end, otherwise than usual."""
PROBLEM = "Ann has 12 apples. She eats 3."
CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}<bos>{{ m.content }} a:"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)

WINDOWS = {
    **{"vocab_size": fakes.VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"sliding_window": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}


def tiny_solver(folder, **changes):
    """A solver over the tiny random model; its steps end in every possible way."""
    return Solver(**tiny_options(folder, **changes))


def tiny_options(folder, **changes):
    """What it is made with."""
    options = {
        "model": str(folder),
        "verifier": "logprob",
        "n": 16,
        "width": 4,
        "delimiter": "e",
        "max_step_tokens": 12,
        "max_tokens": 40,
        "max_rounds": 8,
        "temperature": 1.0,
        "kv_memory": "64MiB",
        "system_prompt": "",
        # With a worker, what `check_conservation` looks at changes while it looks; what is decoded
        # ahead is in no tree.
        "executor": "plain",
        "speculation": "off",
        **changes,
    }
    # What the runs of a test have in common may go with another schedule than theirs.
    row = SCHEDULES.get(options.get("schedule"))
    ignored = () if row is None else row.unused_options
    return {name: value for name, value in options.items() if name not in ignored}


def random_decoder(
    shape, dtype=torch.float32, device="cpu", storage=Storage.PLAIN, pack=keep_unchanged, **how
):
    """A decoder of our own with random weights. shape: or the text of one."""
    shape = shape_from_text(shape) if isinstance(shape, str) else shape
    weights = random_weights(shape, dtype, device, 0, storage, pack)
    return DenseDecoder(shape, weights, **how)


def projections(decoder):
    """The layers' products."""
    layers = decoder.weights.layers
    return [getattr(layer, n) for layer in layers for n in ("qkv", "out", "gate_up", "down")]


@torch.inference_mode()
def prefilled(decoder, token_ids, attention="reference"):
    """Hidden states of tokens that begin a path."""
    budget = 1024 * decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
    model = TreeModel(decoder, make_attention(attention), budget)
    return model.prefill([PrefillRequest((), model.store.create(), token_ids, 0)])[0]


@torch.inference_mode()
def logprobs(decoder, token_ids, attention="reference"):
    """Of what follows each token of a path."""
    return decoder.logits(prefilled(decoder, token_ids, attention)).log_softmax(-1)


def facts(tree):
    """All that is known of a tree's steps."""
    return [
        (n.lineage, n.token_ids, n.logprobs, n.stop, n.text, n.score, n.state, n.stats, n.top)
        for n in tree.nodes()
    ]


def check_conservation(solver, trees):
    """Every block, segment and byte belongs to a node that may still need it."""
    for model in solver._machinery.tree_models:
        model.store.check()
        blocks = model.store.pool.num_blocks - model.store.pool.num_free
        assert model.budget.used_bytes == blocks * model.store.pool.bytes_per_block
    held = [node for tree in trees for node in tree.held]
    handles = [node.handles for tree in trees for node in tree.nodes()]
    assert solver.generator.store.num_segments == sum("generator" in h for h in handles)
    assert all(node.handles == {} for tree in trees for node in set(tree.nodes()) - set(held))


def assert_nothing_allocated(solver):
    if not isinstance(solver, Solver):
        assert not any(each.used_bytes for each in solver.usage().levels.values())
        return
    for model in solver._machinery.tree_models:
        model.store.check()
        assert model.store.num_segments == 0
        assert model.budget.used_bytes == 0
        assert model.store.pool.num_free == model.store.pool.num_blocks


def grow(solver, problem=PROBLEM, **options):
    """Solve, checking conservation after every round; returns the solution and the tree."""
    seen = {}

    def on_round(report):
        seen["tree"] = report.tree
        check_conservation(solver, [report.tree])

    solution = solver.solve(problem, on_round=on_round, **options)
    assert_nothing_allocated(solver)
    return solution, seen["tree"]


@cache
def exact_dtype(attention="tree"):
    """The dtype in which schedules may not change a tree on this machine with this attention.

    float32 where the self-test vouches for it; elsewhere (MKL's products on some CPUs follow the
    batch) rounding may flip a token of float32, and only float64 is promised.
    """
    return "float32" if run_selftest()[attention] else "float64"


def assert_same(found, expected):
    """Solutions have one tree, and scores equal bit for bit where this machine promises as much,
    else to 1e-4: libraries choose a product's kernel by its rows, on some CPUs."""
    assert found.tree_hash == expected.tree_hash
    assert found.tokens.generated == expected.tokens.generated
    tolerance = 0 if found.exact and expected.exact else 1e-4
    for one, other in zip(found.candidates, expected.candidates, strict=True):
        for name in ("lineage", "text", "answer", "stop", "tokens"):
            assert getattr(one, name) == getattr(other, name)
        scores = [other.score, *other.step_scores]
        assert [one.score, *one.step_scores] == pytest.approx(scores, rel=0, abs=tolerance)


class FailingDevice:
    """Stands in for calls that allocate on a device: they raise as its allocator does.

    fails: (name of the call, rows, number of the call) -> whether it fails.
    """

    def __init__(self, monkeypatch, fails):
        self.num_calls = self.num_failures = 0
        calls = [(DenseDecoder, "hidden"), (DenseDecoder, "logits"), (TreeModel, "open_session")]
        for owner, name in calls:
            monkeypatch.setattr(owner, name, self.guarded(name, getattr(owner, name), fails))

    def guarded(self, name, real, fails):
        def call(owner, *args, **kwargs):
            self.num_calls += 1
            if fails(name, len(args[0]), self.num_calls):
                self.num_failures += 1
                raise torch.OutOfMemoryError("an injected failure")
            return real(owner, *args, **kwargs)

        return call

"""The engine against a plain re-computation: `transformers` over each path, our random stream."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from beamwright.attention import make_attention
from beamwright.engine.noise import lineage_key, stack_keys
from beamwright.engine.sampling import RowSampling, Sampler
from beamwright.sections import SamplingSettings
from beamwright.tree import NodeState, StopReason
from engines import CHAT, grow


@pytest.fixture(scope="module")
def oracle(generator_folder):
    """Redraws every token of a tree from full, cache-free forward passes in float64."""
    model = AutoModelForCausalLM.from_pretrained(generator_folder, dtype=torch.float64).eval()

    def check(tree, num_tokens, seed=0, *, tops=False):
        sampler = Sampler(num_tokens, torch.device("cpu"))
        checked = 0
        for node in [n for n in tree.nodes() if n.parent and n.token_ids and not n.turn]:
            path = torch.tensor([node.path_token_ids()])
            with torch.inference_mode():
                logits = model(path).logits[0, node.start - 1 : node.end - 1]
            keys = stack_keys([lineage_key(seed, node.lineage)], torch.device("cpu"))
            positions = torch.arange(node.start, node.end)
            settings = SamplingSettings(temperature=0.0 if node.greedy else 1.0)
            how = RowSampling.of([settings] * len(positions), torch.device("cpu"))
            drawn, logprobs = sampler.sample(logits, keys.expand(len(positions), 2), positions, how)
            assert tuple(drawn.tolist()) == node.token_ids, node
            assert torch.allclose(logprobs, torch.tensor(node.logprobs), atol=1e-4)
            whole = logits[:, :num_tokens].log_softmax(-1).sort(descending=True, stable=True)
            for place, top in enumerate(node.top):
                assert [token for token, _ in top] == whole.indices[place, :20].tolist()
                likely = whole.values[place, :20].tolist()
                assert [value for _, value in top] == pytest.approx(likely, abs=1e-5)
            assert not tops or len(node.top) == len(node.token_ids)
            checked += 1
        assert checked

    return check


def num_tokens(solver):
    return solver._machinery.reader.codec.vocab_size


@pytest.mark.parametrize(
    "options",
    [
        *({"attention": name} for name in ("reference", "dense", "tree")),
        {"top_logprobs": 20},
        {"search": "lookahead", "lookahead": 2, "n": 4, "width": 2},  # rollouts are greedy
        {"search": "revise", "chat_template": CHAT, "n": 4, "max_rounds": 30},  # behind turns, too
    ],
    ids=str,
)
def test_every_token_is_the_one_that_a_plain_forward_pass_draws(make_solver, oracle, options):
    solver = make_solver(dtype="float64", seed=5, **options)
    _, tree = grow(solver)
    oracle(tree, num_tokens(solver), seed=5, tops="top_logprobs" in options)


@pytest.mark.parametrize(("attention", "num_tails"), [("dense", 1), ("tree", 1), ("dense", 2)])
def test_steps_longer_than_the_tail_buffer(make_solver, oracle, attention, num_tails):
    """Full tails move into the segments; rows that go on read them back."""
    length = num_tails * make_attention(attention).tail_tokens + 9
    options = {"step_tokens": length, "max_tokens": length * 2, "ignore_eos": True}
    solver = make_solver(dtype="float64", attention=attention, n=3, width=3, **options)
    solution, tree = grow(solver)
    oracle(tree, num_tokens(solver))
    assert {c.tokens for c in solution.candidates} == {2 * length}


# --- ends and accounting ---------------------------------------------------------------------


def test_a_path_ends_at_the_models_context(make_solver):
    context = 80
    solution, tree = grow(make_solver(context=context, max_tokens=None, ignore_eos=True))
    ended = [node for node in tree.finished() if node.stop is StopReason.CONTEXT_LIMIT]
    assert ended
    assert {node.end for node in ended} == {context}
    assert "context_limit" in {candidate.stop for candidate in solution.candidates}


def test_every_token_is_counted(make_solver):
    solution, tree = grow(make_solver())
    nodes = [node for node in tree.nodes() if node.parent]
    tokens = solution.tokens
    assert tokens.generated == sum(len(node.token_ids) for node in nodes)
    kept = [node for node in nodes if node.state is not NodeState.PRUNED]
    assert tokens.kept == sum(len(node.token_ids) for node in kept)
    assert tokens.generator_prefilled == len(tree.root.token_ids), "the prompt, once"
    parents = [node for node in tree.nodes() if node.children]
    # A step's last token is forwarded with the step: only the prompt is computed for its children.
    assert tokens.generator_reused == sum(node.end for node in parents if node.parent)

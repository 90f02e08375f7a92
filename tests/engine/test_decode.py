"""The engine against a plain re-computation: `transformers` over each path, our random stream."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from beamwright import Solver
from beamwright.attention import make_attention
from beamwright.engine.noise import lineage_key, stack_keys
from beamwright.engine.sampling import RowSampling, Sampler
from beamwright.models.hub import BUNDLED
from beamwright.sections import ModelSettings, SamplingSettings
from beamwright.tree import NodeState, StopReason
from beamwright.verify.find import resolve_verifier
from engines import CHAT, PROBLEM, grow


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


# --- what is kept of every token's distribution -------------------------------------------------


def written(tree):
    return [node for node in tree.nodes() if node.parent]


def by_the_paper(logits, chosen):
    """A path's step entropy, and DeepConf's measures with groups of 16, written out plainly."""
    entropies, confidences = [], []
    for row in logits:
        probs = sorted(row.softmax(0).tolist(), reverse=True)
        entropies.append(-sum(p * math.log(p) for p in probs))
        confidences.append(-sum(math.log(p) for p in probs[:20]) / 20)
    groups = [sum(confidences[i : i + 16]) / 16 for i in range(max(1, len(confidences) - 15))]
    if len(confidences) < 16:
        groups = [sum(confidences) / len(confidences)]
    lowest = sorted(groups)[: max(1, int(0.1 * len(groups)))]
    last = confidences[-16:]
    return {
        "entropy": math.exp(-sum(entropies[-chosen:]) / chosen),
        "deepconf:16": min(groups),
        "deepconf-bottom:16": sum(lowest) / len(lowest),
        "deepconf-tail:16": sum(last) / len(last),
    }


@pytest.mark.parametrize(
    "names", [["entropy"], ["deepconf:16", "deepconf-bottom:16", "deepconf-tail:16"]]
)
def test_scores_of_a_real_search_are_those_of_the_paper(names):
    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "generator", dtype=torch.float64).eval()
    options = {"n": 4, "width": 2, "max_rounds": 4, "delimiter": "\n", "max_tokens": 60}
    solver = Solver(verifier=names[0], kv_memory="16MiB", **options)
    _, tree = grow(solver)
    checked, vocab = 0, num_tokens(solver)
    for node in tree.finished() + tree.candidates():
        with torch.inference_mode():
            logits = model(torch.tensor([node.path_token_ids()])).logits[0, :, :vocab]
        path = logits[len(tree.root.token_ids) - 1 : node.end - 1]
        expected = by_the_paper(path, len(node.token_ids))
        assert node.step_score == pytest.approx(expected[names[0]], rel=1e-4)
        for name in names[1:]:  # these read the same statistic
            scorer = resolve_verifier(ModelSettings(verifier=name)).without_model
            assert scorer.score([node]) == pytest.approx([expected[name]], rel=1e-4)
        checked += len(path) > 25
    assert checked


def test_online_deepconf_writes_a_part_of_best_of_n(make_solver):
    """Its paths draw what they would have drawn anyway, up to where they are given up."""
    options = {"verifier": "deepconf:8", "n": 12, "max_rounds": 12}
    _, whole = grow(make_solver(**options, search="best-of-n"))
    solution, tree = grow(make_solver(**options, search="deepconf", warmup=4, keep=0.25))
    by_lineage = {node.lineage: node.token_ids for node in whole.nodes()}
    assert all(node.token_ids == by_lineage[node.lineage] for node in written(tree))
    ends = [node for node in written(tree) if not node.children]
    pruned = [end for end in ends if end.state is NodeState.PRUNED]
    assert len(ends) == 12 == len(pruned) + len(solution.candidates)
    assert any(not end.ended for end in pruned), "some path was given up on its way"
    assert any(end.ended and end.lineage[1] < 4 for end in pruned), "a warm-up path lost its vote"
    assert solution.reason_fewer.startswith(f"{len(pruned)} of 12 paths fell below the warm-up's ")
    assert len(written(tree)) < len(written(whole))


def tops_of(tree):
    return [(node.lineage, node.token_ids, node.logprobs, node.top) for node in written(tree)]


@pytest.mark.parametrize("options", [{}, {"graphs": "on", "max_batch": 5}], ids=str)
def test_each_problem_gets_what_it_asks_for(make_solver, options):
    with make_solver(n=6, width=2, max_rounds=4, dtype="float64", **options) as solver:
        handles = {count: solver.submit(PROBLEM, top_logprobs=count) for count in (0, 1, 5, 20)}
        trees = {count: handle.result(600).tree for count, handle in handles.items()}
    every = tops_of(trees[20])
    for count, tree in trees.items():
        tops = [tuple(each[:count] for each in top) if count else () for *_, top in every]
        assert tops_of(tree) == [(*f[:3], top) for f, top in zip(every, tops, strict=True)]

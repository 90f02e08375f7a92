"""What is kept of every token's distribution: it changes no token, and depends on no schedule."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import beamwright
from beamwright import Solver
from beamwright.sections import ModelSettings
from beamwright.tree import NodeState
from beamwright.verify.find import resolve_verifier
from engines import PROBLEM, grow

BUNDLED = Path(beamwright.__file__).parent / "bundled"


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


@pytest.fixture(scope="module")
def bundled_logits():
    """A function from token ids to the bundled generator's logits after each, by `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "generator", dtype=torch.float64).eval()

    def logits(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0]

    return logits


@pytest.mark.parametrize(
    "names", [["entropy"], ["deepconf:16", "deepconf-bottom:16", "deepconf-tail:16"]]
)
def test_scores_of_a_real_search_are_those_of_the_paper(bundled_logits, names):
    options = {"n": 4, "width": 2, "max_rounds": 4, "delimiter": "\n", "max_tokens": 60}
    solver = Solver(verifier=names[0], kv_memory="16MiB", **options)
    num_tokens = solver._machinery.reader.codec.vocab_size
    _, tree = grow(solver)
    checked = 0
    for node in tree.finished() + tree.candidates():
        logits = bundled_logits(node.path_token_ids())[:, :num_tokens]
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


# --- the likeliest tokens beside each one -------------------------------------------------------


LIKELY = {"n": 6, "width": 2, "max_rounds": 4, "dtype": "float64"}


def tops_of(tree):
    return [(node.lineage, node.token_ids, node.logprobs, node.top) for node in written(tree)]


@pytest.mark.parametrize("options", [{}, {"graphs": "on", "max_batch": 5}], ids=str)
def test_each_problem_gets_what_it_asks_for(make_solver, options):
    with make_solver(**LIKELY, **options) as solver:
        handles = {count: solver.submit(PROBLEM, top_logprobs=count) for count in (0, 1, 5, 20)}
        trees = {count: handle.result(600).tree for count, handle in handles.items()}
    every = tops_of(trees[20])
    for count, tree in trees.items():
        tops = [tuple(each[:count] for each in top) if count else () for *_, top in every]
        assert tops_of(tree) == [(*f[:3], top) for f, top in zip(every, tops, strict=True)]

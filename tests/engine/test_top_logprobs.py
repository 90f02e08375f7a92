"""The likeliest tokens beside each one: those of the model, for who asks, and no token changes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines import PROBLEM, grow

SMALL = {"n": 6, "width": 2, "max_rounds": 4, "dtype": "float64"}


def written(tree):
    return [node for node in tree.nodes() if node.parent]


def kept(tree):
    return [(node.lineage, node.token_ids, node.logprobs, node.top) for node in written(tree)]


@pytest.mark.parametrize("count", [1, 5, 20])
def test_they_are_those_of_a_plain_forward_pass(make_solver, generator_folder, count):
    model = AutoModelForCausalLM.from_pretrained(generator_folder, dtype=torch.float64).eval()
    solver = make_solver(**SMALL, temperature=0.5, top_k=9, top_logprobs=count)
    num_tokens = solver._machinery.reader.codec.vocab_size
    found_among = 0
    for node in written(grow(solver)[1]):
        with torch.inference_mode():
            logits = model(torch.tensor([node.path_token_ids()])).logits[0]
        logprobs = logits[node.start - 1 : node.end - 1, :num_tokens].log_softmax(-1)
        expected = logprobs.sort(descending=True, stable=True)
        assert len(node.top) == len(node.token_ids) == len(node.logprobs)
        for place, top in enumerate(node.top):
            assert [token for token, _ in top] == expected.indices[place, :count].tolist()
            assert [p for _, p in top] == pytest.approx(
                expected.values[place, :count].tolist(), abs=1e-5
            )
            drawn = dict(top).get(node.token_ids[place])
            found_among += drawn is not None
            assert drawn is None or drawn == pytest.approx(node.logprobs[place], abs=1e-6)
    assert found_among


@pytest.mark.parametrize("options", [{}, {"graphs": "on", "max_batch": 5}], ids=str)
def test_each_problem_gets_what_it_asks_for(make_solver, options):
    with make_solver(**SMALL, **options) as solver:
        handles = {count: solver.submit(PROBLEM, top_logprobs=count) for count in (0, 1, 5, 20)}
        trees = {count: handle.result(600).tree for count, handle in handles.items()}
    every = kept(trees[20])
    for count, tree in trees.items():
        tops = [tuple(each[:count] for each in top) if count else () for *_, top in every]
        assert kept(tree) == [(*f[:3], top) for f, top in zip(every, tops, strict=True)]

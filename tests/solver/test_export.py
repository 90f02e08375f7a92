"""Trees as training data: what a trainer of policies reads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from beamwright import Solver
from beamwright.engine.sampling import RowSampling, filter_logits
from beamwright.models.hub import BUNDLED
from beamwright.solver.export import export_steps
from beamwright.tree import StopReason
from fakes import add_step, new_tree

PROBLEM = (
    "Jack has 70 eggs. In April Jack gets 9 eggs. In May Jack sells 19 eggs. "
    "How many eggs does Jack have now?"
)

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01}


def test_the_advantage_of_a_step_is_how_much_better_its_paths_do_than_its_parents():
    tree = new_tree()
    left, right = tree.expand(tree.root, 2)
    add_step(tree, left, "a")
    tree.keep(left)
    for child, score in zip(tree.expand(left, 2), (1.0, 0.0), strict=True):
        add_step(tree, child, "b", stop=StopReason.EOS)
        child.score = score
    add_step(tree, right, "c", stop=StopReason.EOS)
    right.score = 0.2
    tree.prune(right)
    rows = {row["step"]: row for row in export_steps(tree, 1.0, lambda node: node.score)}
    assert rows["0"]["reward"] == 0.5
    assert rows["0"]["advantage"] == pytest.approx(0.5 - 0.4)
    assert rows["0.1"]["advantage"] == -0.5
    assert rows["1"]["pruned"]
    assert rows["1"]["reward"] == 0.2
    assert sum(rows["0.0"]["completion_mask"]) == len(tree.node(left.lineage).token_ids)
    none = export_steps(tree, 1.0, lambda node: None)
    assert {row["advantage"] for row in none} == {None}


@pytest.fixture(scope="module")
def solved():
    with Solver(n=4, width=2, sampled_logprobs=True, dtype="float64", **SAMPLING) as solver:
        yield solver, solver.solve(PROBLEM)


def test_sampled_log_probabilities_are_those_of_the_distribution_that_was_drawn_from(solved):
    solver, solution = solved
    settings = solution.settings.sampling
    for row in solution.export():
        ids, size = row["input_ids"], sum(row["completion_mask"])
        logits = whole_pass(solver, ids)[-size - 1 : -1]
        how = RowSampling.of([settings] * size, torch.device("cpu"))
        kept = filter_logits(logits / settings.temperature, how.flags, *how.tensors[2:])
        own = torch.tensor(ids[-size:])
        expected = kept.log_softmax(-1)[torch.arange(size), own]
        assert torch.allclose(torch.tensor(row["sampled_logprobs"]).double(), expected, atol=1e-5)
        plain = logits.log_softmax(-1)[torch.arange(size), own]
        assert torch.allclose(torch.tensor(row["logprobs"]).double(), plain, atol=1e-5)


def whole_pass(solver, ids):
    """Logits [tokens, vocab] after each token, by one prefill without the tree."""
    from beamwright.models.prefill import PrefillRequest

    model = solver.generator
    request = PrefillRequest((), model.store.create(), tuple(ids), 0, read=range(len(ids)))
    with torch.inference_mode():
        (hidden,) = model.prefill([request])
    model.store.free(request.segment)
    return model.decoder.logits(hidden).double()


def test_greedy_steps_are_certain_and_without_the_option_nothing_is_invented():
    with Solver(n=2, width=1, temperature=0.0) as solver:
        assert {x for row in solver.solve(PROBLEM).export() for x in row["sampled_logprobs"]} == {0}
        drawn = solver.solve(PROBLEM, temperature=1.0, problem_id=1)
        assert {row["sampled_logprobs"] for row in drawn.export()} == {None}


def test_the_tree_is_the_same_with_the_option(solved):
    _, solution = solved
    with Solver(n=4, width=2, dtype="float64", **SAMPLING) as solver:
        assert solver.solve(PROBLEM).tree_hash == solution.tree_hash


def test_a_trainer_lowers_its_loss_on_the_json_lines(solved, tmp_path):
    """Ten steps of policy gradients on the bundled generator, read by `transformers`."""
    _, solution = solved
    file = tmp_path / "tree.jsonl"
    rows = solution.export(str(file), reward=lambda node: float(node.answer == "60"))
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    policy = AutoModelForCausalLM.from_pretrained(BUNDLED / "generator", dtype=torch.float32)
    optimiser = torch.optim.SGD(policy.parameters(), 0.02)

    def loss():
        total = torch.zeros(())
        for row in rows:
            ids, size = torch.tensor(row["input_ids"]), sum(row["completion_mask"])
            logprobs = policy(ids[None]).logits[0, -size - 1 : -1].log_softmax(-1)
            own = logprobs.gather(1, ids[-size:, None])[:, 0]
            ratio = (own - torch.tensor(row["logprobs"])).exp()
            total = total - row["advantage"] * ratio.sum()
        return total / len(rows)

    assert any(row["advantage"] for row in rows)
    losses = []
    for _ in range(11):
        optimiser.zero_grad()
        (now := loss()).backward()
        losses.append(now.item())
        optimiser.step()
    assert losses[-1] < losses[0]

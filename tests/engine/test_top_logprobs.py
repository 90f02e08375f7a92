"""The likeliest tokens beside each one: those of the model, for who asks, and no token changes."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from beamwright.solver.scheduler import listed
from engines import PROBLEM, grow
from fakes import Grouping
from tape import FixedAttention, put_on_tape

SMALL = {"n": 6, "width": 2, "max_rounds": 4, "dtype": "float64"}
LONG_STEPS = {"delimiter": "Zq", "max_step_tokens": 75, "max_tokens": 160, "ignore_eos": True}


def written(tree):
    return [node for node in tree.nodes() if node.parent]


def kept(tree):
    return [(node.lineage, node.token_ids, node.logprobs, node.top) for node in written(tree)]


def bare(tree):
    return [facts[:3] for facts in kept(tree)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32"},
        {"speculation": "exact", "max_batch": 4},
        {"deterministic": True},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 30},
        {"verifier": "entropy"},
    ],
    ids=str,
)
def test_asking_changes_no_bit_of_what_is_drawn(make_solver, options):
    options = {**SMALL, **options}
    plain, without = grow(make_solver(**options))
    solution, tree = grow(make_solver(**options, top_logprobs=20))
    assert solution.tree_hash == plain.tree_hash
    assert bare(tree) == bare(without)
    assert all(node.top == () for node in without.nodes())


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


def test_a_greedy_path_takes_the_first(make_solver):
    _, tree = grow(make_solver(**SMALL, temperature=0.0, top_logprobs=2))
    for node in written(tree):
        assert [top[0] for top in node.top] == [*zip(node.token_ids, node.logprobs, strict=True)]


def test_they_do_not_depend_on_grouping(make_solver):
    solver = make_solver(**SMALL, top_logprobs=4)
    expected = kept(grow(solver)[1])
    for schedule in (Grouping(1), Grouping(4, reverse=True)):
        solver.schedule = schedule
        assert kept(grow(solver)[1]) == expected, "bit for bit"


def test_a_parked_step_keeps_its_own(make_solver, parked):
    options = {**SMALL, **LONG_STEPS, "max_rounds": 2, "top_logprobs": 3, "host_memory": "8MiB"}
    base = make_solver(**options, schedule="in-gpu")
    expected = kept(grow(base)[1])
    assert parked == []
    block = base.generator.store.device.bytes_per_block
    with make_solver(**options, schedule="locality", kv_memory=29 * block) as solver:
        assert kept(grow(solver)[1]) == expected
    assert parked, "nothing was parked: the test does not test"


REQUESTS = {"none": 0, "one": 1, "five": 5, "all": 20}


@pytest.mark.parametrize("options", [{}, {"graphs": "on"}, {"max_batch": 5}], ids=str)
def test_each_problem_gets_what_it_asks_for(make_solver, options):
    with make_solver(**SMALL, top_logprobs=20) as solver:
        every = {}
        for name in REQUESTS:
            solver.solve(
                PROBLEM, problem_id=name, on_round=lambda r, n=name: every.update({n: r.tree})
            )
    with make_solver(**SMALL, **options) as solver:
        requests = {
            solver._request(PROBLEM, name, solver._problem_settings({"top_logprobs": count})): name
            for name, count in REQUESTS.items()
        }
        for request, solution in solver._run(listed(requests), len(requests)):
            name = requests[request]
            expected = [
                (*facts, tuple(each[: REQUESTS[name]] for each in top) if REQUESTS[name] else ())
                for *facts, top in kept(every[name])
            ]
            assert kept(solution.tree) == expected


def test_a_captured_step_looks_only_where_somebody_asks(make_solver, monkeypatch):
    own = {**SMALL, "n": 8, "max_step_tokens": 12, "max_tokens": 36}
    expected = grow(make_solver(**own, top_logprobs=5))[1]
    solver = make_solver(**own, graphs="on", max_batch=7)
    replay = put_on_tape(monkeypatch, solver, FixedAttention(solver.generator.backend))
    assert solver.solve(PROBLEM).tree_hash
    asked = {ways[-1] for _, ways in replay.keys}
    assert asked == {False}
    trees = []
    for _ in range(2):
        before = replay.num_recorded
        solver.solve(PROBLEM, top_logprobs=5, on_round=lambda report: trees.append(report.tree))
    assert replay.num_recorded == before, "captured once"
    for node, other in zip(written(trees[-1]), written(expected), strict=True):
        assert (node.token_ids, len(node.top)) == (other.token_ids, len(other.top))
        for top, same in zip(node.top, other.top, strict=True):
            assert [i for i, _ in top] == [i for i, _ in same]
            assert [p for _, p in top] == pytest.approx([p for _, p in same], abs=1e-5)


def test_a_checkpoint_has_them_and_nobody_needs_them_to_resume(make_solver, tmp_path):
    solver, file, files = make_solver(**SMALL, top_logprobs=3), tmp_path / "search.json", []
    trees = []

    def keep(report):
        files.append(shutil.copy(file, tmp_path / f"{report.round}.json"))
        trees.append(report.tree)

    expected = solver.solve(PROBLEM, on_round=keep, checkpoint=file)
    seen = []
    for count in (None, 0):
        own = {} if count is None else {"top_logprobs": count}
        found = solver.resume(files[1], on_round=lambda report: seen.append(report.tree), **own)
        assert found.tree_hash == expected.tree_hash
        if count is None:
            for node, other in zip(written(seen[-1]), written(trees[-1]), strict=True):
                assert [[i for i, _ in top] for top in node.top] == [
                    [i for i, _ in top] for top in other.top
                ]
        else:
            assert {bool(node.top) for node in written(seen[-1])} == {True, False}

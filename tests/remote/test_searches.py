"""Searches whose generator is a real server: the same trees as here, where nothing is drawn."""

import json

import pytest

import engines
from beamwright.errors import InputError

PROBLEM = "Ann has 3 apples and eats one."
GREEDY = {"temperature": 0.0, "n": 4, "width": 2}


def steps(solution):
    return {
        node.lineage: (node.token_ids, node.text, node.stop, node.state)
        for node in solution.tree.nodes()
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delimiter": "the"},
        {"step_tokens": 5},
        {"max_tokens": 7},
        {"step_limits": (2, 4, 9)},
        {"stop_strings": ("a", "qq")},
        {"context": 60, "max_tokens": None, "max_rounds": 40},
        {"search": "majority", "verifier": "none"},
        {"search": "aggregate", "aggregate_rounds": 1, "aggregate_prompt": "{solutions}"},
        {"search": "mcts", "width": 4, "verifier": lambda _, steps: len(steps[-1]) / 50},
    ],
)
def test_the_likeliest_tokens_are_those_of_the_model_here(far_solver, generator_folder, options):
    """Tokens, texts, reasons to stop and what selection made of them."""
    given = {**GREEDY, "max_rounds": 4, "max_step_tokens": 12, "max_tokens": 40, "delimiter": "e",
             "verifier": "logprob", **options}  # fmt: skip
    far = far_solver(**given).solve(PROBLEM)
    with engines.tiny_solver(generator_folder, **given) as solver:
        here = solver.solve(PROBLEM)
    assert steps(far) == steps(here)
    assert far.tree_hash == here.tree_hash
    assert far.answer == here.answer
    assert not far.exact
    node = next(node for node in far.tree.nodes() if node.parent is not None)
    assert node.logprobs == pytest.approx(here.tree.node(node.lineage).logprobs, abs=1e-4)


def test_a_search_inside_a_search_is_refused(far, far_solver):
    """NAME of a Beamwright server is a search of its own, each time; NAME:plain is its model."""
    with pytest.raises(InputError, match="search for each step; name its model #tiny:plain"):
        far_solver(model=far.model.removesuffix(":plain"))


def test_what_is_not_known_is_null(far_solver):
    found = json.loads(json.dumps(far_solver().solve(PROBLEM).to_json()))
    assert set(found["kv"].values()) == {None}
    assert found["cache"]["generator"] is None
    assert found["memory"]["generator_kv_bytes"] is None
    assert found["attention"] is None
    assert found["exact"] is False
    assert found["schedule"] == "served"
    assert found["remote"]["token_ids"] is True
    assert found["remote"]["requests"] > found["remote"]["retries"] == 0
    assert found["remote"]["prompt_tokens"] > 0


def test_a_search_can_be_resumed(far_solver, tmp_path):
    """Servers draw the same again for the same seed, so it goes on to the same tree."""
    whole = far_solver(verifier="logprob").solve(PROBLEM)
    file = tmp_path / "tree.checkpoint"

    def stop(report):
        if report.round == 2:
            raise KeyboardInterrupt

    solver = far_solver(verifier="logprob")
    with pytest.raises(KeyboardInterrupt):
        solver.solve(PROBLEM, checkpoint=file, on_round=stop)
    assert solver.resume(file).tree_hash == whole.tree_hash


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"schedule": "locality"}, "--schedule locality"),
        ({"speculation": "exact"}, "--speculation exact"),
        ({"sparse": "exact"}, "--sparse exact"),
        ({"weights": "int8"}, "--weights int8"),
        ({"top_logprobs": 3}, "--top-logprobs 3"),
        ({"verifier": "entropy"}, "entropy"),
        ({"search": "deepconf", "verifier": None}, "confidence"),
    ],
)
def test_what_a_generator_elsewhere_has_not_is_refused(far_solver, options, named):
    with pytest.raises(InputError, match=named):
        far_solver(**options)

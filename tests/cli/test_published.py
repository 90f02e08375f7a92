"""Published, trained models: what they write, how far from the reference, one tree everywhere."""

import gc
import json
from functools import cache

import pytest

from beamwright import Solver
from beamwright.errors import CapacityError
from beamwright_lab.models.published import by_us, compare_predictions
from beamwright_lab.models.published_files import read_reference_of

PROBLEM = "Mia has 3 red and 4 green apples. She eats 2 of them. How many apples are left?"
SEARCH = {
    **{"search": "beam", "verifier": "logprob", "n": 4, "width": 2, "temperature": 1.0},
    **{"step_tokens": 12, "max_tokens": 60, "ignore_eos": True},
}
NUM_TOKENS = 97


def test_log_probabilities_are_those_of_the_files_values(smollm2):
    """Activations are rounded to 8 bits, as llama.cpp's are, or to bfloat16 without the library."""
    reference = read_reference_of("smollm2")
    found = by_us(smollm2, reference["ids"][:NUM_TOKENS], {})
    far = compare_predictions(found, reference["predicted"][: len(found)])
    assert far["median"] < 0.15
    assert far["largest"] < 0.9
    assert far["same_best"] > 0.9


def test_a_chat_ends_where_its_template_says(smollm2):
    solver = Solver(model=str(smollm2), verifier="none", n=1, temperature=0, max_tokens=64)
    answer = solver.solve("What is the capital of France? Answer in one sentence.")
    last = answer.tree.node(answer.candidates[0].lineage).token_ids[-1]
    assert "Paris" in answer.text
    assert solver.codec.tokenizer.id_to_token(last) == "<|im_end|>"


def test_a_receipt_holds_in_less_memory(cli, smollm2, tmp_path):
    file, votes = tmp_path / "answer.json", ("--n", "4", "--choose", "majority")
    place = ("--model", smollm2, "--max-tokens", "24", "--verifier", "none")
    file.write_text(cli("solve", PROBLEM, *place, *votes, "--json").out)
    found = cli("verify", file, "--kv-memory", "6MiB", "--max-batch", "3", "--json")
    assert (found.code, found.json["equal"]) == (0, 1)


@pytest.mark.nightly
def test_a_prompt_beyond_the_window_is_read_as_the_reference_does(gemma):
    reference = read_reference_of("gemma")
    far = compare_predictions(by_us(gemma, reference["ids"], {}), reference["predicted"])
    assert far["median"] < 0.05
    assert far["same_best"] > 0.95


# --- a matrix ------------------------------------------------------------------------------------

PRECISIONS = {"auto": {}, "int8": {"dtype": "float32", "weights": "int8"}}
VARIANTS = {
    "in-gpu, in threes": (1.0, {"schedule": "in-gpu", "max_batch": 3}),
    "60 %, locality, grouped": (0.6, {"schedule": "locality", "batching": "grouped"}),
    "35 %, speculation": (0.35, {"speculation": "exact"}),
    "least": (0.0, {}),
}
"""The whole of it is `python -m beamwright_lab.checks.options --model FILE --matrix`."""


def solve(place, budget_bytes=None, **options):
    """The search's solution; with what it says that it needs where it is given less."""
    while True:
        gc.collect()  # a model that was let go lies in cycles
        memory = {} if budget_bytes is None else {"kv_memory": max(budget_bytes, 1)}
        try:
            return Solver(model=str(place), **SEARCH, **memory, **options).solve(PROBLEM)
        except CapacityError as error:
            assert budget_bytes is not None
            budget_bytes = error.budget_bytes + error.needed_bytes - error.free_bytes


solve_plainly = cache(lambda place, precision: solve(place, **PRECISIONS[precision]))


def assert_one_tree(one, other):
    assert one.tree_hash == other.tree_hash or not (one.exact and other.exact)


@pytest.fixture
def place(request, name):
    return request.getfixturevalue(name)


FILES = pytest.mark.parametrize(
    ("name", "precision"), [("smollm2", "auto"), ("smollm2", "int8"), ("gemma", "auto")]
)


def test_layers_that_come_one_by_one_grow_the_same_tree(smollm2):
    """Attention is called between two stages of the library, not in one call."""
    plain, streamed = solve_plainly(smollm2, "auto"), solve(smollm2, schedule="layerwise")
    assert streamed.exact
    assert streamed.tree_hash == plain.tree_hash


@pytest.mark.nightly
@FILES
@pytest.mark.parametrize(("share", "options"), VARIANTS.values(), ids=VARIANTS)
def test_the_tree_depends_on_no_schedule_or_budget(place, precision, share, options):
    plain = solve_plainly(place, precision)
    budget = None if share == 1 else int(share * plain.kv.device_peak_bytes)
    assert_one_tree(plain, solve(place, budget, **options, **PRECISIONS[precision]))


@pytest.mark.nightly
@FILES
def test_a_search_that_was_interrupted_goes_on_to_the_same_tree(place, precision, tmp_path):
    def stop(report):
        if report.round == 2:
            raise KeyboardInterrupt

    file, plain = tmp_path / "search.json", solve_plainly(place, precision)
    solver = Solver(model=str(place), **SEARCH, **PRECISIONS[precision])
    with pytest.raises(KeyboardInterrupt):
        solver.solve(PROBLEM, checkpoint=file, on_round=stop)
    assert_one_tree(plain, solver.resume(file))


@pytest.mark.nightly
@FILES
def test_a_receipt_is_verified_where_memory_is_short(cli, place, precision, tmp_path):
    plain, file = solve_plainly(place, precision), tmp_path / "answer.json"
    file.write_text(json.dumps(plain.to_json()))
    budget = str(plain.kv.device_peak_bytes * 8 // 10)  # less than 3 in 4 holds no path
    found = cli("verify", file, "--kv-memory", budget, "--json")
    assert (found.code, found.json["equal"]) == (0, 1)

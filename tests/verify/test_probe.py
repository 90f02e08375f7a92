"""A head on the generator's hidden states: its scores, whatever the schedule, and what is refused.

`tests/lab/test_probe_training.py` trains one.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from beamwright import Solver
from beamwright.cli.app import main
from beamwright.errors import InputError
from beamwright.models.digest import digest_of
from beamwright.models.hf_config import read_shape
from beamwright.models.hub import BUNDLED
from beamwright.verify.probe import ProbeHead
from engines import assert_same, exact_dtype

PROBLEM = (
    "Paul starts with 106 pears. Then in June Paul gives away 41 pears. Later in July Paul doubles "
    "the number of pears. How many pears does Paul have now?"
)
SEARCH = {"n": 8, "width": 2, "dtype": "float64", "temperature": 1.0}


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """The file of a head of random weights."""
    generator, folder = torch.Generator().manual_seed(0), BUNDLED / "generator"
    features = 2 * read_shape(folder, None).hidden + 1
    shapes = ((8, features), (8,), (1, 8), (1,))
    tensors = [torch.randn(shape, generator=generator) / 16 for shape in shapes]
    tensors[3] += 3.0  # products of many chances must not vanish
    file = tmp_path_factory.mktemp("head") / "head.safetensors"
    ProbeHead(tensors, digest_of(folder)["sha256"], "bundled", {}).save(file)
    return file


def made(head, **options):
    return Solver(**{**SEARCH, "model": "bundled", "verifier": f"probe:{head}", **options})


def solved(head, **options):
    with made(head, **options) as solver:
        return solver.solve(PROBLEM)


@pytest.fixture(scope="module")
def plain(head):
    return solved(head, drafts="off", speculation="off")


@pytest.mark.parametrize(
    "options",
    [
        {"kv_memory": "400KiB"},
        {"speculation": "exact"},
        {"batching": "grouped", "max_batch": 3},
        {"drafts": "auto"},
        {"attention": "reference"},
    ],
    ids=str,
)
def test_trees_and_scores_do_not_depend_on_the_schedule(head, plain, options):
    found = solved(head, **options)
    assert found.tree_hash == plain.tree_hash
    assert (found.cache.verifier, found.tokens.verifier_prefilled) == (None, 0)
    assert len({round(each.score, 6) for each in found.candidates}) > 1
    for one, other in zip(found.candidates, plain.candidates, strict=True):
        assert one.step_scores == pytest.approx(other.step_scores, abs=1e-9)


def test_scores_have_equal_bits_beside_other_problems(head):
    with made(head, dtype="float32") as solver:
        alone = solver.solve(PROBLEM, problem_id="p")
        others = [(number, PROBLEM.replace("41", str(number))) for number in (12, 13)]
        beside = solver.solve_many([*others, ("p", PROBLEM)])[-1]
    assert alone.exact or exact_dtype() == "float64"
    assert_same(beside, alone)


def test_a_resumed_search_grows_the_same_tree(head, plain, tmp_path):
    file, saved = tmp_path / "search.json", []

    def copy(report):
        saved.append(shutil.copy(file, tmp_path / f"round-{report.round}.json"))

    with made(head) as solver:
        solver.solve(PROBLEM, checkpoint=file, on_round=copy)
    with made(head) as solver:
        resumed = solver.resume(saved[1])
    assert resumed.tree_hash == plain.tree_hash
    scores = [candidate.score for candidate in plain.candidates]
    assert [c.score for c in resumed.candidates] == pytest.approx(scores, rel=1e-6)


# --- what is refused -------------------------------------------------------------------------


def refused(verifier, model="bundled"):
    with pytest.raises(InputError) as caught:
        Solver(model=model, verifier=verifier)
    return str(caught.value)


def test_the_head_of_another_generator(head):
    line = refused(f"probe:{head}", "bundled:strong")
    assert "trained for the generator bundled, but --model" in line


def test_a_head_that_is_not_there_or_damaged_or_of_another_format(head, tmp_path):
    assert "no such file" in refused(f"probe:{tmp_path}/none")
    assert "write probe:HEAD" in refused("probe:")
    torn = tmp_path / "torn"
    torn.write_bytes(head.read_bytes()[:-100])
    assert "cannot be read" in refused(f"probe:{torn}")
    other = tmp_path / "other"
    save_file({"x": torch.ones(1)}, other)
    assert "the format is unknown" in refused(f"probe:{other}")
    tensors = load_file(head)
    with safe_open(head, "pt") as stored:
        facts = stored.metadata()
    save_file({**tensors, "layers.0.bias": torch.ones(3)}, other, facts)
    assert "is damaged" in refused(f"probe:{other}")


def test_a_generator_elsewhere_gives_no_hidden_states(head, tmp_path, capsys):
    words = ["solve", "1 + 1", "--model", "openai:http://127.0.0.1:9/v1", "--tokenizer", "bundled"]
    assert main([*words, "--verifier", f"probe:{head}"]) == 2
    assert "hidden states" in capsys.readouterr().err


def test_given_steps_have_no_hidden_states(head):
    line = pytest.raises(InputError, match="only sampled tokens")
    with Solver(model="bundled", verifier=f"probe:{head}") as solver, line:
        solver.score(PROBLEM, ["June: Paul 106-41=65."])

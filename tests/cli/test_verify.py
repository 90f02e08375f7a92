"""`beamwright verify` with the bundled pair: equal elsewhere, and what was changed is found."""

import hashlib
import json
import shutil
from functools import reduce
from operator import getitem

import pytest

from beamwright import Solver
from beamwright.io import read_toml_beside
from beamwright.models.hub import BUNDLED
from beamwright.saved.checkpoint import read_checkpoint
from beamwright.tree import RawPrompt, round_digests, tree_hash
from served import Served

PROBLEM = "Jack has 70 eggs. In April Jack gets 9 eggs. How many eggs does Jack have now?"
SMALL = ("--n", "4", "--width", "2", "--dtype", "float64")
ELSEWHERE = ("--schedule", "locality", "--kv-memory", "900KiB", "--max-batch", "3")
CHANGES = read_toml_beside(__file__)


def put(content, place, value):
    """Another value at a place such as `receipt.rounds.1`."""
    *way, last = (int(key) if key.lstrip("-").isdigit() else key for key in place.split("."))
    reduce(getitem, way, content)[last] = value


@pytest.fixture(scope="module")
def solved():
    """What `solve` said, once it was asked."""
    return []


@pytest.fixture
def answer(cli, tmp_path, solved):
    """An answer in a file, with other values at some of its places."""
    file = tmp_path / "answer.json"
    if not solved:
        solved.append(cli("solve", PROBLEM, *SMALL, "--json").out)

    def write(changes=(), **more):
        changed = json.loads(solved[0])
        for place, value in {**dict(changes), **more}.items():
            put(changed, place, value)
        file.write_text(json.dumps(changed))
        return file

    return write


def report(cli, *words, code=0):
    found = cli("verify", *words, "--json")
    assert found.code == code, found.err
    return found.json


@pytest.mark.parametrize("search", ["beam", "dvts", "mcts"])
def test_a_tree_is_the_same_at_another_budget_and_schedule(cli, tmp_path, search):
    file = tmp_path / "answer.json"
    solved = cli("solve", PROBLEM, *SMALL, "--search", search, "--seed", "5", "--json")
    file.write_text(solved.out)
    found = report(cli, file, *ELSEWHERE, "--speculation", "exact")
    assert (found["checked"], found["equal"], found["parted"]) == (1, 1, [])
    assert found["changed"]["schedule"] == "locality"
    assert "are required" in found["promised"]


def test_a_receipt_is_small_and_alone_enough(cli, tmp_path, answer):
    receipt = json.loads(answer().read_text())["receipt"]
    assert len(json.dumps(receipt)) < 2000
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(receipt))
    found = cli("verify", file)
    assert found.code == 0
    assert found.out == f"equal 0: tree {receipt['tree_hash'][:10]}, answer 79\n"
    assert "1 of 1 equal" in found.complaint


@pytest.mark.parametrize(("what", "number", "changes"), CHANGES["parts"])
def test_what_was_changed_is_found(cli, answer, what, number, changes):
    found = report(cli, answer(changes), code=1)
    assert found["equal"] == 0
    assert (found["parted"][0]["what"], found["parted"][0].get("round", 0)) == (what, number)


def test_the_tree_of_a_choice_that_is_gone_is_grown_again(cli, answer):
    gone = {"receipt.settings.choose": "pairwise", "receipt.settings.compare_budget": 3}
    assert report(cli, answer(gone, answer="80"))["equal"] == 1
    assert cli("verify", answer(answer="80")).out.startswith("differs 0: ")


def test_a_changed_file_of_a_model_is_named(cli, tmp_path, answer):
    folder = tmp_path / "generator"
    shutil.copytree(BUNDLED / "generator", folder)
    assert report(cli, answer(), "--model", folder)["equal"] == 1
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    found = cli("verify", answer(), "--model", folder)
    assert found.code == 2
    assert "the generator here differs in model.safetensors" in found.complaint


def test_versions_that_differ_are_told_and_nothing_is_required_then(cli, answer):
    found = report(cli, answer({"receipt.versions.torch": "2.0.0"}))
    assert found["differs"]["torch"][0] == "2.0.0"
    assert "not required: torch may change" in found["promised"]
    threads = {"receipt.machine.threads": "64"}
    found = report(cli, answer(threads))
    assert found["differs"]["threads"][0] == "64"
    assert "are required" in found["promised"]
    found = report(cli, answer({**threads, "receipt.rounds": ["other"]}), code=1)
    assert "not required: threads may change" in found["promised"]
    assert report(cli, answer({"receipt.exact": False}))["exact"] is False


@pytest.mark.parametrize(("said", "changes"), CHANGES["refused"])
def test_what_cannot_be_grown_again_is_one_line(cli, answer, said, changes):
    found = cli("verify", answer(changes))
    assert (found.code, found.out) == (2, "")
    assert said in found.complaint


def test_what_a_receipt_would_have_read_is_read_once_its_reader_says_so(cli, tmp_path, answer):
    template = tmp_path / "template.jinja"
    written = json.loads((BUNDLED / "generator" / "tokenizer_config.json").read_text())
    template.write_text(written["chat_template"])
    file = answer({"receipt.settings.chat_template": str(template)})
    assert "Add --chat-template" in cli("verify", file).complaint
    assert report(cli, file, "--chat-template", template)["equal"] == 1
    template.write_bytes(b"\xff{")
    assert (
        "neither a file nor a template"
        in cli("verify", file, "--chat-template", template).complaint
    )


def test_a_line_stays_short_whatever_a_receipt_holds(cli, answer):
    unrepeatable = answer({"receipt.unrepeatable": "long " * 100_000})
    assert len(cli("verify", unrepeatable).complaint) < 3000
    assert len(cli("verify", answer({"receipt.problem_id": "long " * 100_000})).out) < 3000


def test_a_deadline_and_a_stop_of_ones_own_leave_no_repeatable_tree():
    with Solver(n=4, width=2, dtype="float64") as solver:
        for options in ({"deadline": 1e-9}, {"stop": lambda tree: "enough"}):
            assert solver.solve(PROBLEM, **options).receipt["unrepeatable"] is not None
        for options in ({"deadline": 900}, {"token_budget": 30}, {"stop": lambda tree: None}):
            assert solver.solve(PROBLEM, **options).receipt["unrepeatable"] is None


# --- other files -----------------------------------------------------------------------------


@pytest.fixture
def checkpoint(cli, tmp_path):
    file = tmp_path / "search.json"
    assert cli("solve", PROBLEM, *SMALL, "--checkpoint", file).code == 0
    return file


def test_a_checkpoint_says_which_token_is_another(cli, checkpoint):
    assert report(cli, checkpoint)["equal"] == 1
    content = json.loads(checkpoint.read_text())
    step = content["search"]["nodes"][1]
    step["token_ids"][2] = was = step["token_ids"][2] ^ 1
    digest = hashlib.sha256(json.dumps(content["search"], separators=(",", ":")).encode())
    content["sha256"] = digest.hexdigest()
    checkpoint.write_text(json.dumps(content))
    assert "receipt does not match the tree" in cli("verify", checkpoint).complaint
    tree = read_checkpoint(checkpoint).tree
    receipt = content["ended"]["receipt"]
    receipt.update(rounds=round_digests(tree), tree_hash=tree_hash(tree))
    checkpoint.write_text(json.dumps(content))
    (parted,) = report(cli, checkpoint, code=1)["parted"]
    place = tree.node((0, *step["lineage"])).start + 2
    assert (parted["what"], parted["lineage"]) == ("tokens", step["lineage"])
    assert [parted[name] for name in ("position", "was", "now")] == [place, was, was ^ 1]
    said = f"in round 2 of {tree.rounds}, step 0.0: position {place} was token {was}"
    assert said in cli("verify", checkpoint).out


def test_a_checkpoint_of_a_search_under_way(cli, checkpoint):
    content = json.loads(checkpoint.read_text())
    del content["ended"]
    checkpoint.write_text(json.dumps(content))
    assert "has not ended" in cli("verify", checkpoint).complaint


@pytest.mark.nightly
def test_a_folder_of_an_evaluation(cli, tmp_path):
    out = tmp_path / "out"
    cli("eval", "bundled:test", "--limit", "3", *SMALL, "--out", out)
    assert report(cli, out, *ELSEWHERE, "--in-flight", "2")["equal"] == 3
    assert report(cli, out / "results.jsonl", "--limit", "2")["checked"] == 2
    found = cli("verify", out, "--problem", "test/0001")
    assert found.out.startswith("equal test/0001: ")
    assert "contains no problem 'x'" in cli("verify", out, "--problem", "x").complaint
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    lines[0]["receipt"]["settings"]["seed"] = 9
    lines[1]["receipt"]["unrepeatable"] = "--deadline 1s had passed"
    (out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = report(cli, out, code=1)
    assert (found["checked"], found["equal"], len(found["skipped"])) == (2, 1, 1)
    assert found["parted"][0]["problem_id"] == lines[0]["unique_id"]


def test_a_reply_of_a_server(cli, tmp_path):
    file = tmp_path / "reply.json"
    with Solver(n=4, width=2, dtype="float64") as solver, Served(solver) as server:
        reply = server.chat(PROBLEM, seed=3, temperature=0.7).json()
        body = {"model": "tiny", "prompt": ["One egg", "Two eggs"], "max_tokens": 20}
        several = server.http.post("/v1/completions", json=body).json()
    file.write_text(json.dumps(reply))
    assert report(cli, file, *ELSEWHERE)["equal"] == 1
    reply["choices"][0]["message"]["content"] += " "
    file.write_text(json.dumps(reply))
    assert report(cli, file, code=1)["parted"][0]["said"] == ["text"]
    file.write_text(json.dumps(several))
    assert report(cli, file)["equal"] == 2


def test_a_prompt_as_it_is_and_a_synthetic_one(cli, tmp_path):
    file = tmp_path / "found.json"
    with Solver(n=4, width=2, dtype="float64") as solver:
        file.write_text(json.dumps(dict(solver.solve(RawPrompt((5, 6, 7))).receipt)))
    assert report(cli, file)["equal"] == 1
    shape = "random:llama,layers=1,hidden=32,heads=2,kv_heads=2,intermediate=64,vocab=99,context=99"
    words = ("--prompt-tokens", "9", "--model", shape, "--step-tokens", "4", "--max-tokens", "8")
    file.write_text(cli("solve", *words, *SMALL, "--json").out)
    assert report(cli, file)["equal"] == 1


@pytest.mark.parametrize(("said", "content"), CHANGES["foreign"])
def test_foreign_json_is_one_line(cli, tmp_path, said, content):
    file = tmp_path / "x.json"
    file.write_text(content)
    found = cli("verify", file)
    assert found.code == 2
    assert said in found.complaint

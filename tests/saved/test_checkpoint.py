"""The checkpoint's file: all of a tree comes back; damage and foreign files are told apart."""

import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.saved.checkpoint import (
    VERSION,
    Checkpoint,
    CheckpointWriter,
    read_checkpoint,
    tree_settings,
)
from beamwright.tree import StopReason, tree_hash
from fakes import add_step, grow, new_tree
from played import new_run
from tables import beside


def small_tree():
    """Every state but open, a greedy node, odd numbers, and text that does not simply go on."""
    tree = new_tree("p-1", text='é "quoted"\n')
    tree.rounds = 2
    first, second, third = grow(tree, tree.root, ["a \ufffd", "b", "c"])
    first.score, second.score, third.score = 0.1 + 0.2, math.nan, None
    first.step_score = -math.inf
    first.usage.update(generator_prefilled=3, overrun=1)
    tree.root.usage.update(verifier_prefilled=7)
    tree.keep(first)
    tree.prune(second)
    (rollout,) = tree.expand(first, 1, greedy=True)
    stats = {"entropy": (1 / 3, 0.0), "confidence": (math.inf, 3.5)}
    tree.commit(rollout, (5, 6), (-0.1, -1 / 3), StopReason.STEP_LIMIT, "a 한\ud800", stats)
    tree.keep(rollout)
    add_step(tree, *tree.expand(rollout, 1), "!", stop=StopReason.EOS)
    add_step(tree, *tree.expand(first, 1), "?")
    tree.finish(rollout.children[0])
    tree.rounds = 3
    return tree


def checkpoint(tree, **changes):
    values = {
        "settings": {"seed": 0, "delimiter": "\n\n", "step_limits": [1, 2]},
        "tree": tree,
        "elapsed_s": 1.5,
        "round_tokens": (3, 9),
        "finished_s": {tree.finished()[0]: 1.1} if tree.finished() else {},
        **changes,
    }
    return Checkpoint(**values)


def write(file, found):
    """As a run is saved that is as far as this."""
    run = SimpleNamespace(
        tree=found.tree, round_tokens=found.round_tokens, finished_s=found.finished_s
    )
    CheckpointWriter(file, found.settings)(run, found.elapsed_s)


def described(tree):
    return [
        (n.lineage, n.state, n.stop, n.token_ids, n.logprobs, n.text, n.start, n.greedy, n.usage,
         repr(n.score), repr(n.step_score), n.stats)
        for n in tree.nodes()
    ]  # fmt: skip


@pytest.fixture
def file(tmp_path):
    found = tmp_path / "search.json"
    write(found, checkpoint(small_tree()))
    return found


def test_everything_comes_back(file):
    tree, found = small_tree(), read_checkpoint(file)
    assert described(found.tree) == described(tree)
    assert tree_hash(found.tree) == tree_hash(tree)
    assert found.tree.root.problem_text == tree.root.problem_text
    assert (found.tree.rounds, found.tree.done, found.tree.reason_fewer) == (3, False, None)
    assert found.settings == {"seed": 0, "delimiter": "\n\n", "step_limits": [1, 2]}
    assert {n.lineage: s for n, s in found.finished_s.items()} == {("p-1", 0, 0, 0): 1.1}
    run = new_run(found.tree)
    found.restore_progress(run)
    assert (run.round_tokens, run.elapsed_s) == ([3, 9], 1.5)


def test_the_file_is_json_in_ascii_and_is_replaced_as_a_whole(file):
    content = json.loads(file.read_text(encoding="ascii"))
    assert (content["format"], content["version"]) == ("beamwright checkpoint", VERSION)
    write(file, checkpoint(new_tree()))
    assert [n.lineage for n in read_checkpoint(file).tree.nodes()] == [(0,)]
    assert [path.name for path in file.parent.iterdir()] == ["search.json"]


# --- damage ----------------------------------------------------------------------------------


def message(file):
    with pytest.raises(InputError) as caught:
        read_checkpoint(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_any_change_of_a_byte_is_found(file):
    """A byte that reads as something else, at many places: never another tree."""
    whole = file.read_bytes()
    for place in range(0, len(whole) - 1, 7):
        other = b"7" if whole[place : place + 1] != b"7" else b"8"
        file.write_bytes(whole[:place] + other + whole[place + 1 :])
        assert "checkpoint" in message(file)


def test_a_torn_file_is_found_wherever_it_ends(file):
    whole = file.read_bytes()
    for end in range(0, len(whole) - 2, 11):
        file.write_bytes(whole[:end])
        assert "not a checkpoint, or damaged" in message(file)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff\xfe\x00", "not a checkpoint"),
        (b"[1, 2]", "not a checkpoint"),
        (b'{"version": 1, "nodes": []}', "not a checkpoint"),
        (b'{"format": "beamwright checkpoint", "version": 1}', "version 1; this program reads"),
        (b'{"format": "beamwright checkpoint", "version": 4}', "damaged (KeyError: 'search')"),
    ],
)
def test_foreign_files(tmp_path, content, complaint):
    (tmp_path / "other").write_bytes(content)
    assert complaint in message(tmp_path / "other")


def test_files_that_are_not_there(tmp_path):
    assert "No such file" in message(tmp_path / "nowhere")
    assert "cannot be read" in message(tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        write(tmp_path / "no" / "where", checkpoint(new_tree()))


def rewrite(file, body):
    content = json.dumps(body, separators=(",", ":"))
    about = {"format": "beamwright checkpoint", "version": VERSION, "search": body}
    about["sha256"] = hashlib.sha256(content.encode()).hexdigest()
    file.write_text(json.dumps(about))


def test_what_older_files_have_of_nodes_is_passed_over(file):
    body = json.loads(file.read_text())["search"]
    for node in body["nodes"]:
        node["probe"] = None
    rewrite(file, body)
    assert tree_hash(read_checkpoint(file).tree) == tree_hash(small_tree())


@pytest.mark.parametrize(
    ("name", "value"), beside(__file__)["forged"], ids=lambda each: str(each)[:9]
)
def test_a_field_that_cannot_be_is_named(file, name, value):
    body = json.loads(file.read_text())["search"]
    owner = body if name in body else body["nodes"][0]
    assert name in owner
    owner[name] = value
    rewrite(file, body)
    said = message(file)
    assert "damaged" in said
    assert ("None" if name == "stop" else "round" if value == [] else name) in said
    assert len(said) < 300 + len(str(file))


# --- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "wanted", "complaint"),
    [
        ({"n": 8, "seed": 0}, {"n": 8, "seed": 1, "top_k": 5}, "--seed 0, not 1"),
        ({"n": 8}, {"n": 8, "top_k": 5}, "--top-k unset, not 5"),
        ({"n": 8, "gone": "x"}, {"n": 8}, "--gone 'x', not unset"),
    ],
)
def test_the_first_difference_is_named(saved, wanted, complaint):
    found = checkpoint(new_tree(), settings=saved)
    with pytest.raises(InputError) as caught:
        found.check_settings(Path("f.json"), wanted)
    assert str(caught.value) == f"f.json: was saved with {complaint}; use the saved value"
    found.check_settings(Path("f.json"), dict(saved))


def test_what_decides_the_tree_is_every_setting_but_where_and_when_it_is_computed():
    base = tree_settings(Settings(), "float32")
    assert base["dtype"] == "float32"
    same = {"schedule": "in-gpu", "memory": "1GiB", "deadline": 3, "device": "cuda"}
    same |= {"attention": "dense", "choose": "majority", "stop_votes": True}
    assert tree_settings(Settings.build(**same), "float32") == base
    for change in ({"seed": 1}, {"model": "x"}, {"top_p": 0.5}, {"step_limits": "1,2"}, {"n": 8}):
        assert tree_settings(Settings.build(**change), "float32") != base
    for change in ({"weights": "int8"}, {"verifier_weights": "int4"}):
        assert tree_settings(Settings.build(**change), "float32") != base
    limited = tree_settings(Settings.build(step_limits="1,2"), "float32")
    assert json.loads(json.dumps(limited)) == limited, "as it comes back from the file"

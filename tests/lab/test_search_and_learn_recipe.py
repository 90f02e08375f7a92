"""search-and-learn's keys: what they become, what is said about each, what is refused."""

import pytest
import yaml

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.evaluate.recipes import read_recipe
from beamwright.plugins import load_plugin
from beamwright.registry import restored
from beamwright_lab import search_and_learn
from beamwright_lab.search_and_learn_recipe import translate

BEAM = """
filter_duplicates: true
approach: beam_search
n: 16
beam_width: 8
num_iterations: 10
temperature: 0.7
top_p: 0.9
max_tokens: 512
model_path: org/small
prm_path: ./prm
agg_strategy: min
system_prompt: Think.
custom_chat_template: none
dataset_name: org/problems
num_samples: 50
dataset_start: 0
dataset_end: 10
search_batch_size: 2
prm_batch_size: 1
sort_completed: true
lookahead: 1
seed: 7
"""


def options_of(**keys):
    return translate(keys, "recipe r").options


def test_a_beam_search_file_becomes_a_recipe(tmp_path):
    found = translate(yaml.safe_load(BEAM), "r")
    path = tmp_path / "beam_search.yaml"
    path.write_text(found.recipe())
    with restored():
        load_plugin(search_and_learn.__file__)
        recipe = read_recipe(path, {})
        (run,) = recipe.runs
        assert run.settings == Settings.build(
            search="search-and-learn",
            n=16,
            width=8,
            max_rounds=10,
            filter_duplicates=True,
            temperature=0.7,
            top_p=0.9,
            max_step_tokens=512,
            model="hf:org/small",
            verifier="./prm",
            aggregate="min",
            system_prompt="Think.",
            seed=7,
        )
    assert recipe.dataset == "hf:org/problems@test"
    notes = "\n".join(found.notes)
    for key in BEAM.split("\n"):
        assert key.partition(":")[0] in notes
    assert "beam_width: --width 8" in found.notes
    assert "search_batch_size: give --in-flight 2" in found.notes
    assert "lookahead: ignored (its scores do not use the rollouts" in notes


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_is_shown_as_it_is_written(value):
    notes = translate({"approach": "beam_search", "filter_duplicates": value}, "r").notes
    assert f"filter_duplicates: --{'' if value else 'no-'}filter-duplicates" in notes


@pytest.mark.parametrize(
    ("keys", "dataset"),
    [
        ({"n": 4}, "hf:HuggingFaceH4/MATH-500@test"),
        ({"dataset_name": "o/d", "dataset_split": "train"}, "hf:o/d@train"),
        ({"dataset_name": "o/d", "dataset_config": "c", "dataset_split": None}, "hf:o/d/c"),
    ],
)
def test_problems_come_from_the_hub(keys, dataset):
    assert translate(keys, "r").dataset == dataset


def test_problems_come_from_a_file_or_folder_that_is_there(tmp_path):
    file = tmp_path / "set.jsonl"
    file.touch()
    assert translate({"dataset_name": str(file)}, "r").dataset == str(file)
    folder = {"dataset_name": str(tmp_path)}
    assert translate(folder, "r").dataset == str(tmp_path)
    assert translate({**folder, "dataset_split": "dev"}, "r").dataset == f"{tmp_path}@dev"


def test_what_is_left_out_keeps_search_and_learns_default():
    options = options_of(approach="dvts")
    assert (options["n"], options["width"], options["max_rounds"], options["seed"]) == (
        4,
        4,
        40,
        42,
    )
    assert (options["aggregate"], options["max_step_tokens"]) == ("last", 2048)
    assert "n (default): --n 4" in translate({"approach": "dvts"}, "r").notes


def test_a_path_of_best_of_n_is_one_call():
    options = options_of(approach="best_of_n", max_tokens=300, beam_width=8)
    assert (options["search"], options["max_tokens"]) == ("best-of-n", 300)
    assert options["max_rounds"] == options["max_step_tokens"] == 300
    assert "width" not in options


def test_a_step_of_a_tree_is_one_call():
    options = options_of(approach="beam_search", max_tokens=300)
    assert options["max_step_tokens"] == 300
    assert "max_tokens" not in options


@pytest.mark.parametrize(
    ("path", "model"),
    [("org/m", "hf:org/m"), ("/a/m", "/a/m"), ("./m", "./m"), ("bundled", "bundled")],
)
def test_models_are_hub_names_or_folders(path, model):
    assert options_of(model_path=path)["model"] == model


def test_a_local_folder_goes_before_the_hub(tmp_path, monkeypatch):
    (tmp_path / "org" / "m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert options_of(model_path="org/m")["model"] == "org/m"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n": 4, "beam_size": 2}, "unknown key 'beam_size'"),
        ({"n": 4, "search": {"n": 4}}, "unknown key 'search'"),
        ({"approach": "mcts"}, "approach 'mcts' (there are best_of_n, beam_search, dvts)"),
        ({"approach": ["dvts"]}, "approach ['dvts']"),
        ({"dataset_start": 5}, "dataset_start has no counterpart"),
        ({"num_samples": "all"}, "num_samples must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1"),
        ({"load_in_4bit": True}, "load_in_4bit has no counterpart"),
    ],
)
def test_refusals_are_one_line(keys, message):
    with pytest.raises(InputError) as caught:
        translate(keys, "recipe r")
    assert str(caught.value).startswith("recipe r: ")
    assert message in str(caught.value)

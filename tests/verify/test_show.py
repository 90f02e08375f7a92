"""What `doctor --verifier PATH --show` says of every family, and of files that are wrong."""

import shutil
from pathlib import Path

import pytest
import torch

from beamwright.errors import InputError
from beamwright.models.tokenizer import TextCodec
from beamwright.sections import ModelSettings
from beamwright.verify.show import PROBLEM, STEPS, show_verifier
from prm_goldens import GOLDENS, write_golden


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return {name: write_golden(name, tmp_path_factory.mktemp("prm")) for name in GOLDENS}


@pytest.fixture(scope="module")
def shown(options):
    """What is said of each family's checkpoint."""
    return {name: show_verifier(ModelSettings(verifier=option)) for name, option in options.items()}


def read_tokens(report):
    return [[token["text"] for token in step["read"]] for step in report["steps"]]


def text_of(report, part):
    """The text of the tokens that are of one part only, in a row."""
    tokens = report["tokens"]
    return "".join(token["text"] for token in tokens if token["parts"] == [part])


@pytest.mark.parametrize("family", GOLDENS)
def test_scores_are_those_of_the_published_recipe(family, options, shown):
    folder = options[family].rpartition(":")[2]
    with torch.inference_mode():
        expected = GOLDENS[family].recipe(Path(folder))(PROBLEM, list(STEPS))
    own = [step["score"] for step in shown[family]["steps"] if step["score"] is not None]
    assert own == pytest.approx(expected, abs=1e-4)
    assert shown[family]["no_scores"] is None


def test_where_each_format_is_read(shown):
    assert [step["step_read"] for step in shown["qwen2.5-math-prm"]["tokens"]].count(3) == 1
    assert read_tokens(shown["qwen2.5-math-prm"]) == [["<extra_0>"]] * 3
    assert read_tokens(shown["skywork-o1"]) == [["\n"]] * 3
    assert read_tokens(shown["skywork-o1-paragraphs"]) == [["\n\n"]] * 3
    assert [texts[0].strip() for texts in read_tokens(shown["math-shepherd"])] == ["ки"] * 3
    assert read_tokens(shown["rlhflow"]) == [["\n\n"]] * 3  # where + is predicted
    at = shown["rlhflow"]["steps"][0]["read_at"][0]
    assert shown["rlhflow"]["tokens"][at + 1]["parts"] == ["mark"]
    assert [len(texts) for texts in read_tokens(shown["outcome"])] == [0, 0, 1]
    assert shown["outcome"]["tokens"][-1]["step_read"] == 3


def test_every_token_has_its_part(shown):
    report = shown["qwen2.5-math-prm"]
    assert text_of(report, "problem") == PROBLEM
    assert [text_of(report, f"step {number}") for number in (1, 2, 3)] == list(STEPS)
    assert text_of(report, "mark") == "<extra_0>" * 3
    assert "reason step by step" in text_of(report, "prefix")
    for family in ("rlhflow", "outcome"):
        assert text_of(shown[family], "step 3").endswith("{130}.")
    for report in shown.values():
        assert [token["position"] for token in report["tokens"]] == [*range(len(report["tokens"]))]
        parts = {part for token in report["tokens"] for part in token["parts"]}
        assert {"problem", "step 1", "step 2", "step 3"} <= parts


def test_what_counts_as_good(shown, options):
    head = shown["math-shepherd"]["head"]
    codec = TextCodec.load(Path(options["math-shepherd"]))
    assert (head["good"]["id"], head["bad"]["id"]) == (*codec.encode("+"), *codec.encode("-"))
    assert shown["qwen2.5-math-prm"]["head"]["good"] == "class 1 of 2"
    assert shown["skywork-o1"]["head"]["layers"] == ("v_head.summary",)


def test_a_step_whose_tokens_change_says_so(shown):
    assert all(step["same_tokens"] for step in shown["qwen2.5-math-prm"]["steps"])
    assert shown["outcome"]["steps"][-1]["same_tokens"]


def test_tokens_are_shown_where_the_weights_are_not_there(options, tmp_path):
    folder = shutil.copytree(options["qwen2.5-math-prm"], tmp_path / "prm")
    (folder / "model.safetensors").unlink()
    (folder / "verifier.yaml").write_text("family: qwen2.5-math-prm\naggregate: min\n")
    report = show_verifier(ModelSettings(verifier=str(folder)))
    assert (report["aggregate"], report["score"]) == ("min", None)
    assert read_tokens(report) == [["<extra_0>"]] * 3
    assert str(folder) in report["no_scores"]


@pytest.mark.parametrize("name", ["logprob", "none", "deepconf:64", "judge:{folder}"])
def test_what_has_no_tokens_to_read_is_an_error(name, options):
    name = name.format(folder=options["rlhflow"])
    with pytest.raises(InputError, match="is no reward model"):
        show_verifier(ModelSettings(verifier=name))

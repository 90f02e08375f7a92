import json
import re
from dataclasses import replace

import pytest

from beamwright.cli.plan import seconds_cell, seconds_text
from beamwright.plan.machines import NAMED_PROFILES, write_profile

PAPER = ["plan", "--model", "opt-6.7b", "--n", "64", "--prompt", "128", "--generate", "1920"]
INLINE = "random:llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=100,context=256"
GIB = 2**30


@pytest.mark.parametrize("model", ["OPT-2.7b", "random:qwen2.5-1.5b", INLINE, "bundled"])
def test_models_by_name_shape_and_folder(cli, model):
    report = cli("plan", "--model", model, "--prompt", "64", "--json").json
    assert report["model"] == model
    assert report["weight_bytes"] > 0
    # As `solve` would: the bundled verifier is the default beside the bundled model alone.
    assert (report["verifier"] is not None) == (model == "bundled")


def test_a_checkpoint_folder_and_its_context(cli, generator_folder):
    report = cli("plan", "--model", generator_folder, "--prompt", "16", "--json").json
    context = json.loads((generator_folder / "config.json").read_text())["max_position_embeddings"]
    assert report["prompt"] + report["generate"] == context
    capped = cli("plan", "--model", generator_folder, "--prompt=16", "--context=40", "--json").json
    assert capped["generate"] == 24
    assert capped["step_tokens"] == 24


def test_the_measured_machine(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    outcome = cli("plan", "--gpu", "measured")
    assert outcome.code == 2
    assert "beamwright doctor --probe" in outcome.complaint
    write_profile(NAMED_PROFILES["epyc-2core"])
    report = cli("plan", "--model", INLINE, "--gpu", "measured", "--json").json
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    words = ("plan", "--model", INLINE, "--weights=int8", "--gpu", "measured", "--json")
    assert cli(*words).json["weights"] == "int8"
    write_profile(replace(NAMED_PROFILES["epyc-2core"], coded_bandwidth=1e10, coded_flops=1e12))
    assert cli(*words).json["weights"] == "int8 in blocks"


def test_a_page_to_read(cli):
    out = cli(*PAPER, "--width", "2", "--step-tokens", "128", "--kv-memory", "7GiB").out
    answer, total = out.index("about "), out.index("needs ")
    assert 0 == answer < total < out.index("GiB: does not fit")
    for words in ("on rtx-4090", "locality, tree", "no fit", "12.4", "no --gpu"):
        assert words in out
    assert "data sheet, not measured" in " ".join(out.split())
    assert "LBS" not in out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\u2026" not in out, "nothing is cut off"


def test_a_reward_model_with_a_head_of_its_own_has_no_lm_head(cli, generator_folder):
    """By name, by family, or by its files; a config.json alone does not say."""

    def weights(verifier, *words):
        words = ["plan", "--model", "qwen2.5-0.5b", "--gpu", "h100", "--verifier", verifier, *words]
        return cli(*words, "--json").json["verifier"]["weight_bytes"]

    lm_head = 2 * 152064 * 3584
    whole = weights("qwen2.5-7b")
    for name in ("skywork-prm-7b", "hf:Qwen/Qwen2.5-Math-PRM-7B", "family:skywork-o1:qwen2.5-7b"):
        assert weights(name) == whole - lm_head
    for name in ("likelihood:skywork-prm-7b", "family:rlhflow:skywork-prm-7b"):
        assert weights(name) == whole
    assert weights(str(generator_folder)) == weights(f"likelihood:{generator_folder}")


def test_the_answer_is_true_and_its_advice_helps(cli):
    words = ["plan", "--model", "qwen2.5-7b", "--gpu", "rtx-4090", "--width", "4", "--json"]
    words += ["--memory", "16GiB", "--n"]
    found = cli(*words, "128").json
    most = found["max_beams_in_gpu"]
    assert not found["fits"]
    assert 0 < most < 128
    at_most = cli(*words, most).json
    assert at_most["fits"] or at_most["borderline"]
    option, value, *_ = found["advice"].split()
    assert (option, value) == ("--weights", "int8")
    assert cli(*words, "128", option, value).json["fits"]
    other = cli(*words, "2048", "--weights", "int4", "--kv-memory", "1GiB").json
    assert other["advice"].startswith(
        f"use about --n {other['max_beams_in_gpu']}, or use --schedule locality"
    )


def test_the_profiles_are_listed(cli):
    out = cli("plan", "--gpu", "list").out
    for words in ("rtx-3060", "h200", "epyc-2core", "measured", "not measured"):
        assert words in out
    assert max(len(line) for line in out.splitlines()) <= 80
    listed = cli("plan", "--gpu", "list", "--json").json["profiles"]
    assert [each["name"] for each in listed] == [*NAMED_PROFILES]
    assert all(each["source"] for each in listed)


def test_the_cuda_device_of_this_machine_is_the_default(cli, monkeypatch):
    def device(name, gib):
        monkeypatch.setattr(
            "beamwright.cli.machine.cuda_name_and_memory", lambda: (name, gib * GIB)
        )

    device("NVIDIA GeForce RTX 3060", 11)
    report = cli("plan", "--model", "qwen2.5-1.5b", "--json").json
    assert (report["gpu"], report["memory"]["device_bytes"]) == ("rtx-3060", 11 * GIB)
    assert "this machine's NVIDIA GeForce RTX 3060" in cli("plan", "--model", "qwen2.5-1.5b").out
    device("NVIDIA Abacus", 11)
    out = " ".join(cli("plan", "--model", "qwen2.5-1.5b").out.split())
    assert "no profile of this machine's NVIDIA Abacus: figures are for rtx-4090" in out


def test_a_hybrid_needs_a_state_for_each_row(cli):
    asked = ["plan", "--model", "qwen3.5-27b", "--weights", "int4", "--memory", "24GB", "--n", "64"]
    report = cli(*asked, "--json").json
    assert report["state_bytes"] == 147.75 * 2**20
    assert [*report["schedules"]] == ["in-gpu/tree", "locality/tree"]
    assert report["memory"]["generator_kv_bytes"] > 80 * report["state_bytes"]
    assert not report["fits"]
    page = " ".join(cli(*asked).out.split())
    assert "MiB/row" in page
    assert "147.75" in page
    assert "locality keeps the rest in host memory" in page


def test_an_aggregation_is_planned_with_its_later_prompts(cli):
    words = ["--model", "qwen2.5-1.5b", "--gpu", "rtx-4090", "--n", "16", "--generate", "100"]
    words += ["--prompt", "50", "--step-tokens", "20", "--search", "aggregate"]
    report = cli("plan", *words, "--json").json
    each = report["later_generations"]
    assert (each["rounds"], each["prompt_tokens"], each["fits"]) == (2, 450, True)
    assert each["unshared_tokens"] == 16 * 450
    assert 50 + 4 * 100 < each["prefill_tokens"] < 16 * 400, "answers at the beginning are shared"
    most = 16 * 104 * report["kv_bytes_per_token"]
    assert each["population_kv_bytes"] == most < each["kv_bytes"]
    assert "2 later generations, each: 16 prompts of 450 tokens" in " ".join(
        cli("plan", *words).out.split()
    )
    assert "later_generations" not in cli("plan", *words[:-2], "--json").json


def test_times_of_a_sentence_have_their_unit_and_those_of_the_table_only_if_long():
    words = {0: "0 s", 0.14: "0.14 s", 38: "38.0 s", 599: "599 s", 2280: "38 min", 9000: "2.5 h"}
    assert {seconds: seconds_text(seconds) for seconds in words} == words
    cells = {0: "0", 0.14: "0.14", 38: "38.0", 599: "599", 2280: "38 min", 9000: "2.5 h"}
    assert {seconds: seconds_cell(seconds) for seconds in cells} == cells


def test_a_sentence_on_long_generations_says_minutes(cli):
    words = ["plan", "--model", "qwen2.5-1.5b", "--gpu", "epyc-2core", "--n", "16"]
    words += ["--generate", "1500", "--prompt", "50", "--search", "aggregate"]
    out = " ".join(cli(*words).out.split())
    assert re.search(r"; \d+ min of prefill and \d+ min of decoding", out)

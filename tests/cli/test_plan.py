import json

import pytest

from beamwright.hardware import NAMED_PROFILES, write_profile

PAPER = ["plan", "--model", "opt-6.7b", "--n", "64", "--prompt", "128", "--generate", "1920"]
INLINE = "random:llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=100,context=256"
KEYS = {
    "model",
    "gpu",
    "n",
    "width",
    "prompt",
    "generate",
    "step_tokens",
    "weights",
    "weight_bytes",
    "weight_traffic_bytes",
    "verifier",
    "kv_bytes_per_token",
    "kv_budget_bytes",
    "fits",
    "max_beams_in_gpu",
    "analytic",
    "schedules",
}
GIB = 2**30


@pytest.mark.parametrize(
    ("step_tokens", "locality", "printed"), [(32, 2052, 2010), (64, 1044, 990), (128, 540, 480)]
)
def test_the_papers_figures(cli, step_tokens, locality, printed):
    words = [*PAPER, "--step-tokens", step_tokens, "--kv-memory", "7GiB", "--json"]
    analytic = cli(*words).json["analytic"]
    assert round(analytic["layerwise_gib"]) == 53_012
    assert round(analytic["locality_gib"]) == locality
    assert round(analytic["locality_printed_gib"]) == printed


def test_the_whole_report(cli):
    report = cli(*PAPER, "--width", "2", "--kv-memory", "7GiB", "--json").json
    assert set(report) == KEYS
    assert (report["model"], report["gpu"]) == ("opt-6.7b", "rtx-4090")
    assert (report["n"], report["width"], report["step_tokens"]) == (64, 2, 32)
    assert report["kv_bytes_per_token"] == 512 * 1024
    assert report["weight_bytes"] == 2 * 6_658_473_984
    assert report["kv_budget_bytes"] == 7 * GIB
    assert report["fits"] == report["schedules"]["in-gpu"]["fits"]
    assert report["max_beams_in_gpu"] % 2 == 0
    for each in report["schedules"].values():
        assert {"fits", "time_s", "decode_s", "stall_s", "h2d_bytes", "d2h_bytes"} <= set(each)
        assert {"groups", "peak_kv_bytes"} <= set(each)


def test_what_does_not_apply_is_null(cli):
    report = cli(*PAPER, "--kv-memory", "200MiB", "--json").json
    assert report["fits"] is False
    dense = report["schedules"]["layerwise-dense"]
    assert dense.pop("fits") is False
    assert set(dense.values()) == {None}


def test_the_budget_is_what_weights_and_activations_leave(cli):
    default = cli(*PAPER, "--json").json
    smaller = cli(*PAPER, "--memory", "20GiB", "--json").json
    assert default["kv_budget_bytes"] - smaller["kv_budget_bytes"] == 4 * GIB
    assert 10 * GIB < default["kv_budget_bytes"] < 24 * GIB - default["weight_bytes"]


def test_eight_beams_fit_the_papers_card(cli):
    report = cli("plan", "--model", "opt-6.7b", "--n", "8", "--width", "2", "--json").json
    assert report["fits"]
    assert {each["h2d_bytes"] for each in report["schedules"].values()} == {0}


def test_precision(cli):
    half = cli(*PAPER, "--json").json
    words = [*PAPER, "--gpu", "h100", "--dtype", "float32", "--json"]
    assert cli(*words).json["kv_bytes_per_token"] == 2 * half["kv_bytes_per_token"]


@pytest.mark.parametrize("model", ["OPT-2.7b", "random:qwen2.5-1.5b", INLINE, "bundled"])
def test_models_by_name_shape_and_folder(cli, model):
    report = cli("plan", "--model", model, "--prompt", "64", "--json").json
    assert report["model"] == model
    assert report["weight_bytes"] > 0


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


def test_a_table_to_read(cli):
    out = cli(*PAPER, "--width", "2", "--step-tokens", "128", "--kv-memory", "7GiB").out
    for words in ("opt-6.7b on rtx-4090", "locality-tree", "no fit", "53,012", "540", "12.4 GiB"):
        assert words in out
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gpt-9"], "--model gpt-9"),
        (["--model", "random:gpt-9"], "no such shape"),
        (["--model", "opt-6.7b", "--gpu", "abacus"], "--gpu abacus: no such profile"),
        (["--model", "opt-6.7b", "--gpu", "rtx-3080-ti"], "nothing is left for KV"),
        (["--model", "opt-6.7b", "--memory", "12GiB"], "--memory is 12.0 GiB"),
        (["--model", "opt-6.7b", "--memory", "32GiB"], "rtx-4090 has 24.0 GiB"),
        (["--model", "opt-6.7b", "--kv-memory", "12GiB"], "rtx-4090 has 24.0 GiB"),
        (["--model", "opt-6.7b", "--memory", "18GiB", "--kv-memory", "7GiB"], "--memory is 18.0"),
        (["--model", "opt-6.7b", "--memory", "much"], "--memory"),
        (["--model", "opt-6.7b", "--generate", "1921"], "context of opt-6.7b, 2048 tokens"),
        (["--model", "opt-6.7b", "--prompt", "2048"], "context of opt-6.7b, 2048 tokens"),
        (["--model", "opt-6.7b", "--n", "6"], "not a multiple of --width 4"),
        (["--model", "opt-6.7b", "--step-tokens", "1921"], "--step-tokens 1921"),
        (["--model", "opt-6.7b", "--prompt", "0"], "'--prompt'"),
        (["--temperature", "1"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(cli, words, message):
    outcome = cli("plan", *words)
    assert outcome.code == 2
    assert message in outcome.complaint
    assert outcome.out == ""


SMALL_CARD = ["plan", "--model", "qwen2.5-7b", "--memory", "12GB"]


def test_7b_with_a_verifier_on_a_12_gb_card_needs_int4(cli):
    both = [*SMALL_CARD, "--verifier", "qwen2.5-1.5b", "--json"]
    for weights in ("auto", "int8"):
        outcome = cli(*both, "--weights", weights)
        assert outcome.code == 2
        assert "nothing is left for KV" in outcome.complaint
    report = cli(*both, "--weights", "int4").json
    assert (report["weights"], report["fits"]) == ("int4-tiled", True)
    verifier = report["verifier"]
    assert verifier["model"] == "qwen2.5-1.5b"
    taken = report["weight_bytes"] + verifier["weight_bytes"]
    taken += report["kv_budget_bytes"] + verifier["kv_budget_bytes"]
    assert 0.9 * 12e9 < taken < 12e9
    for each in (report, verifier):
        assert each["kv_budget_bytes"] // each["kv_bytes_per_token"] > 20_000
    smaller = cli(*both, "--weights", "int4", "--verifier-weights", "int8").json
    assert smaller["verifier"]["weight_bytes"] < verifier["weight_bytes"]
    assert smaller["kv_budget_bytes"] > report["kv_budget_bytes"]


def test_a_verifier_takes_its_part_only_where_it_has_weights(cli):
    alone = cli(*SMALL_CARD, "--weights", "int4", "--json").json
    assert alone["verifier"] is None
    logprob = cli(*SMALL_CARD, "--weights", "int4", "--verifier", "logprob", "--json").json
    assert logprob == alone
    shown = cli(*SMALL_CARD, "--weights", "int4", "--verifier", "bundled").out
    assert "(int4-tiled)" in shown
    assert "of weights," in shown


def test_int8_is_read_and_written_once_more(cli):
    plain, int8 = (
        cli(*SMALL_CARD[:3], "--weights", weights, "--json").json for weights in ("auto", "int8")
    )
    assert plain["weight_traffic_bytes"] == plain["weight_bytes"] > int8["weight_bytes"]
    assert int8["weight_traffic_bytes"] > plain["weight_traffic_bytes"]


def test_weights_of_a_verifier_that_is_not_named(cli):
    outcome = cli(*SMALL_CARD, "--verifier-weights", "int8")
    assert outcome.code == 2
    assert "--verifier-weights needs --verifier" in outcome.complaint


def test_a_model_that_is_not_there_names_the_shapes(cli):
    outcome = cli("plan", "--model", "nope")
    assert outcome.code == 2
    assert "--model nope: no such folder; shapes: opt-2.7b, opt-6.7b, " in outcome.complaint
    outcome = cli("plan", "--verifier", "nope")
    assert "--verifier nope: no such folder; known: none, " in outcome.complaint
    assert "judge:PATH; shapes: opt-2.7b, " in outcome.complaint
    assert "--verifier judge:nope: no such folder" in cli("plan", "--verifier", "judge:nope").err

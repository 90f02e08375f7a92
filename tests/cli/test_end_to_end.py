"""The command line over the real engine: a tiny random checkpoint, a few tokens per step."""

import json

import pytest


@pytest.fixture
def small(generator_folder):
    return (
        *("--model", generator_folder, "--verifier", "logprob", "--n", "4", "--width", "2"),
        *("--step-tokens", "6", "--max-tokens", "12", "--context", "256"),
    )


def test_eval_is_the_same_in_any_batches_and_records_bad_problems(cli, small, tmp_path):
    dataset = tmp_path / "set.jsonl"
    problems = ["How many?", "How many?", "long " * 100, "How much?"]
    dataset.write_text("".join(json.dumps({"problem": p, "answer": "1"}) + "\n" for p in problems))
    hashes = []
    for in_flight in (1, 4, "auto"):
        out = tmp_path / f"out{in_flight}"
        report = cli("eval", dataset, *small, "--json", "--out", out, "--in-flight", in_flight).json
        assert (report["problems"], report["errors"]) == (4, 1)
        lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
        lines.sort(key=lambda line: line["unique_id"])  # they come as they finish
        assert "context" in lines[2]["error"]
        hashes.append([line["tree_hash"] for line in lines])
    assert hashes[0] == hashes[1] == hashes[2]
    assert hashes[0][0] != hashes[0][1]  # equal texts are two problems with draws of their own


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--n 6 --width 4", 2, "width"),
        ("--device abacus", 2, "abacus"),
        ("--kv-memory 1KiB", 1, "device KV budget too small"),
    ],
)
def test_what_cannot_be_is_one_line(cli, small, words, code, message):
    outcome = cli("solve", *small, "p", *words.split(), "--json")
    assert (outcome.code, outcome.out) == (code, "")
    assert message in outcome.complaint


def test_doctor_compares_with_transformers(cli, generator_folder, tmp_path):
    words = ("doctor", "--dtype", "float32", "--json", "--model")
    report = cli(*words, generator_folder, "--parity").json
    assert report["supported"] is True
    assert set(report["max_abs_logit_diff"]) == {"prefill", "chunked", "decode"}
    assert max(report["max_abs_logit_diff"].values()) < 1e-4
    shown = cli("doctor", "--dtype", "float32", "--model", generator_folder, "--parity").out
    assert f"{report['parameters']:,}" in shown
    assert f"{report['max_abs_logit_diff']['decode']:.2e}" in shown
    assert "max_abs_logit_diff" not in cli(*words, "bundled").json
    config = json.loads((generator_folder / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    outcome = cli(*words, tmp_path)
    assert (outcome.code, outcome.json["supported"]) == (2, False)
    assert "mamba" in outcome.complaint.lower()

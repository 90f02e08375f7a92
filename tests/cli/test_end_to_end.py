"""The command line over the real engine: a tiny random checkpoint, a few tokens per step."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

SOLVE_KEYS = {
    "answer", "text", "score", "stop", "rounds", "candidates", "tree", "tokens", "kv", "time",
    "io_share", "goodput_tok_s", "tree_hash", "exact", "seed", "schedule", "attention",
}  # fmt: skip
GROUP_KEYS = {
    "tree": {"nodes", "pruned", "unique_tokens", "path_tokens"},
    "tokens": {
        "generated", "kept", "overrun", "speculated", "speculated_kept", "generator_prefilled",
        "generator_reused", "verifier_prefilled", "verifier_reused",
        "verifier_generated",
    },
    "kv": {
        "device_budget_bytes", "device_peak_bytes", "host_peak_bytes", "h2d_bytes", "d2h_bytes",
        "groups", "dm_lower_bound_bytes",
    },
    "time": {
        "total_s", "decode_s", "verify_s", "both_s", "schedule_s", "stall_s", "other_s",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*letters, "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=vocab["<eos>"],
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def small(checkpoint):
    return (
        *("--model", checkpoint, "--verifier", "logprob", "--n", "4", "--width", "2"),
        *("--step-tokens", "6", "--max-tokens", "12", "--dtype", "float32"),
    )


def test_solve_prints_the_contract(cli, small):
    solution = cli("solve", "How many?", *small, "--json").json
    assert set(solution) >= SOLVE_KEYS
    for group, keys in GROUP_KEYS.items():
        assert set(solution[group]) >= keys
    assert len(solution["candidates"]) == 4
    for candidate in solution["candidates"]:
        assert set(candidate) == {
        "answer", "score", "stop", "tokens", "text", "lineage", "step_scores"
    }  # fmt: skip


def test_the_seed_decides_the_tree(cli, small):
    hashes = [
        cli("solve", "How many?", *small, "--json", "--seed", seed).json["tree_hash"]
        for seed in (0, 0, 1)
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_synthetic_prompt(cli, small):
    assert cli("solve", "--prompt-tokens", "16", *small, "--json").json["rounds"] == 2


def test_every_round_is_shown(cli, small):
    err = cli("solve", "How many?", *small, "--progress").err
    assert "round 1 | 4 candidates | 2 kept | 2 pruned" in err
    assert "round 2 | 4 candidates" in err


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
    ("words", "message"),
    [
        (("long " * 100,), "context"),
        (("p", "--n", "6", "--width", "4"), "width"),
        (("p", "--n", "2", "--width", "4"), "width"),
        (("p", "--search", "guess"), "guess"),
        (("p", "--model", "nowhere"), "nowhere"),
        (("p", "--verifier", "nowhere"), "nowhere"),
        (("p", "--attention", "reference", "--device", "abacus"), "abacus"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(cli, small, words, message):
    outcome = cli("solve", *small, *words, "--json")
    assert outcome.code == 2
    assert message in outcome.complaint
    assert outcome.out == ""


def test_a_budget_that_is_too_small_is_exit_1(cli, small):
    outcome = cli("solve", "How many?", *small, "--kv-memory", "1KiB", "--json")
    assert outcome.code == 1
    assert "device KV budget exhausted" in outcome.complaint


def test_doctor_compares_with_transformers(cli, checkpoint):
    words = ("doctor", "--model", checkpoint, "--dtype", "float32", "--parity", "--json")
    report = cli(*words).json
    assert report["supported"] is True
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert set(report["max_abs_logit_diff"]) == {"prefill", "chunked", "decode"}
    assert max(report["max_abs_logit_diff"].values()) < 1e-4


def test_doctor_on_an_unsupported_architecture(cli, checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    outcome = cli("doctor", "--model", tmp_path, "--json")
    assert outcome.code == 2
    assert outcome.json["supported"] is False
    assert "mamba" in outcome.complaint.lower()


def test_doctor_on_this_machine(cli):
    report = cli("doctor", "--json").json
    assert set(report) >= {"python", "torch", "threads", "exact", "selftest"}

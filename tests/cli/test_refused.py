"""What a command refuses: one line that names the option or the file, exit code 2, no output."""

import shlex

import pytest

REFUSED = {
    "": [
        ("explore", "No such command"),
    ],
    "solve": [
        ("", "give one of"),
        ("p --prompt-tokens 8", "give one of"),
        ("--prompt-tokens 0", "--prompt-tokens"),
        ("' '", "the problem is empty"),
        ("--problem-file nowhere.txt", "nowhere.txt"),
        ("p --colour", "No such option"),
        ("p --n x", "'--n'"),
        ("p --n 0", "--n"),
        ("p --dtype int8", "'--dtype'"),
        ("p --memory '7 lightyears'", "--memory"),
        ("p --recipe nowhere.yaml", "nowhere.yaml"),
        ("p --search lookahead --record-tree t", "--record-tree does not go with --search looka"),
        ("p --search deepconf --record-tree t", "--record-tree does not go with --search deepc"),
        ("--resume nowhere.json", "--resume nowhere.json: no such file"),
        ("p --checkpoint no/where.json", "--checkpoint no/where.json: cannot be written"),
        (f"--prompt-tokens 8 --resume {__file__}", "--prompt-tokens does not go with --resume"),
        ("p --deadline soon", "'soon' is not a duration: write 30s, 2m or 1h"),
        ("p --token-budget 0", "--token-budget"),
        (
            "p --verifier nothere",
            "error: --verifier nothere: no such folder; known: none, logprob, min-logprob, "
            "entropy, deepconf, deepconf-bottom, deepconf-tail, bundled, hf:ORG/NAME, "
            "likelihood:PATH, family:NAME:PATH, judge:PATH, probe:HEAD\n",
        ),
        ("p --verifier judge:none", "error: --verifier judge:none: no such folder\n"),
        ("p --verifier ./nothere", "error: --verifier ./nothere: no such folder\n"),
        ("p --verifier likelihood:no", "error: --verifier likelihood:no: no such folder\n"),
        ("p --choose pairwise", "was removed; a vote (--choose majority) chose right more often"),
        ("p --attention fast", "Invalid value for '--attention': 'fast' is not one of"),
    ],
    "solve --n 4": [
        ("p --search guess", "guess"),
        ("p --model nowhere", "nowhere"),
        ("p --plugin nowhere.py", "nowhere.py"),
        ("p --zeal 0.25", "--zeal"),
    ],
    "eval": [
        ("", "give DATASET"),
        ("nowhere.jsonl", "nowhere.jsonl: cannot be read (No such file"),
        ("bundled:train", "no such bundled problem set"),
        ("bundled:test --limit 0", "--limit"),
        ("bundled:test --in-flight 0", "--in-flight"),
        ("bundled:test --trees 1", "--trees"),
        ("bundled:test --trees 0 --out o", "--trees"),
        ("bundled:test --paths", "--paths"),
        ("bundled:test --replicas many", "--replicas many: give a number, or auto"),
        ("bundled:test --advise --answer-field none", "no right answers"),
    ],
    "plan": [
        ("--model gpt-9", "--model gpt-9"),
        ("--model random:gpt-9", "no such shape"),
        ("--model nope", "--model nope: no such folder; shapes: opt-2.7b, opt-6.7b, "),
        ("--verifier nope", "--verifier nope: no such folder; known: none, "),
        ("--verifier nope", "judge:PATH, probe:HEAD; shapes: opt-2.7b, "),
        ("--verifier judge:nope", "--verifier judge:nope: no such folder"),
        ("--temperature 1", "No such option"),
    ],
    "plan --model opt-6.7b": [
        ("--gpu abacus", "--gpu abacus: no such profile"),
        ("--gpu rtx-3080-ti", "nothing is left for KV"),
        ("--memory 12GiB", "--memory 12.0 GiB: weights take"),
        ("--memory 32GiB", "rtx-4090 has 24.0 GiB"),
        ("--kv-memory 12GiB", "rtx-4090, 24.0 GiB: "),
        ("--memory 18GiB --kv-memory 7GiB", "--memory 18.0"),
        ("--memory much", "--memory"),
        ("--generate 1921", "context of opt-6.7b, 2048 tokens"),
        ("--prompt 2048", "context of opt-6.7b, 2048 tokens"),
        ("--n 6", "not a multiple of --width 4"),
        ("--step-tokens 1921", "--step-tokens 1921"),
        ("--prompt 0", "'--prompt'"),
    ],
    "simulate --model opt-6.7b --n 8 --width 2 --generate 128": [
        ("--schedules fast", "--schedules fast"),
        ("--schedules ''", "--schedules"),
        ("--engines slang", "did you mean sglang?"),
        ("--engines ''", "--engines"),
        ("--search mcts", "--search mcts"),
        ("--gpu abacus", "--gpu abacus"),
        ("--model opt-9b", "opt-9b"),
        ("--width 3", "--width 3"),
        ("--generate 4000", "context"),
        ("--kv-memory 20GiB", "--kv-memory"),
        ("--link-bandwidth fast", "fast"),
        ("--link-bandwidth 1GB/s --schedules in-gpu", "--link-bandwidth: does nothing"),
        ("--speculation truncate", "--speculation truncate"),
        ("--speculation exact --schedules layerwise", "--speculation exact"),
    ],
    "simulate": [
        ("--recorded-tree /no/such/file", "/no/such/file"),
        ("--model bundled --n 65536", "steps of --step-tokens"),
        ("--model bundled --n 512 --generate 1000000000000", "steps of --step-tokens"),
        ("--model bundled --n 512 --step-tokens 1", "steps of --step-tokens"),
    ],
    "doctor": [
        ("--parity", "--parity needs --model"),
        ("--weights int8", "--weights needs --model"),
        ("--verifier bundled", "--verifier needs --model or --show"),
        ("--model bundled --probe", "--probe measures the machine"),
        ("--show", "--show needs --verifier"),
        ("--show --verifier bundled --model bundled", "--model: --show looks at"),
        ("--show --verifier bundled --probe", "--probe: --show looks at"),
        ("--show --verifier logprob", "--verifier logprob is no reward model"),
        ("--show --verifier /nowhere/at/all", "--verifier /nowhere/at/all"),
    ],
    "verify": [
        ("nowhere.json", "cannot be read"),
        ("f.json --speculation truncate", "another tree each time"),
        ("f.json --in-flight 0", "--in-flight 0"),
        ("f.json --n 3", "--n"),
    ],
    "demo": [("--n 4", "--n")],
    "view --no-browser": [("none.json", "none.json: cannot be read")],
    "report": [("nowhere", "no such folder")],
    **{
        command: [
            (f"{option} {number}", f"({option})")
            for option in ("--n", "--width")
            for number in (65537, 10**12)
        ]
        for command in ("solve p ", "simulate ", "plan ")
    },
}
"""By command: the rest of its words, and what the line says."""


@pytest.mark.parametrize(
    ("words", "message"),
    [(f"{command} {rest}", said) for command, rows in REFUSED.items() for rest, said in rows],
)
def test_one_line_and_exit_2(cli, fake, words, message):
    outcome = cli(*shlex.split(words))
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.complaint
    assert not fake.calls

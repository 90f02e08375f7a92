from beamwright.evaluate import Record, summarise
from beamwright.evaluate.metrics import bootstrap_interval, goodput


def record(index, correct, **changes):
    return Record(
        unique_id=str(index),
        index=index,
        problem="p",
        gold="1",
        correct=correct,
        **{"level": None, **changes},
    )


def test_accuracy_over_judged_problems():
    summary = summarise([record(0, True), record(1, False), record(2, None)])
    assert (summary["problems"], summary["judged"], summary["correct"]) == (3, 2, 1)
    assert summary["accuracy"] == 0.5


def test_what_does_not_apply_is_null():
    summary = summarise([record(0, None)])
    for name in ("accuracy", "accuracy_interval", "mean_rounds", "goodput_tok_s"):
        assert summary[name] is None
    assert summary["by_choice"] == {"best": None, "majority": None, "weighted": None}


def test_sums_skip_missing_figures():
    tokens = [{"generated": 3, "speculated": None}, {"generated": 4, "speculated": None}]
    summary = summarise([record(i, True, tokens=each) for i, each in enumerate(tokens)])
    assert summary["tokens"] == {"generated": 7, "speculated": None}


def test_goodput_counts_every_candidate_once():
    # 2 candidates of mean 100 tokens in 10 s and 1 of 50 tokens in 1 s: 250 tokens in 21 s.
    records = [
        record(0, True, mean_path_tokens=100, goodput_tok_s=10.0, candidates=[{}, {}]),
        record(1, True, mean_path_tokens=50, goodput_tok_s=50.0, candidates=[{}]),
        record(2, False, error="too long"),
    ]
    assert goodput(records) == 250 / 21


def test_levels_in_numeric_order():
    levels = [10, 9, "10", None, "hard"]
    records = [record(i, i == 0, level=level) for i, level in enumerate(levels)]
    by_level = summarise(records)["by_level"]
    assert list(by_level) == ["9", "10", "hard"]
    assert by_level["10"] == {"problems": 2, "correct": 1, "accuracy": 0.5}


def test_errors_are_wrong_whoever_chooses():
    choices = {how: {"answer": "1", "correct": True} for how in ("best", "majority", "weighted")}
    summary = summarise([record(0, True, choices=choices), record(1, False, error="too long")])
    assert summary["errors"] == 1
    assert summary["by_choice"] == {"best": 0.5, "majority": 0.5, "weighted": 0.5}


def test_bootstrap_interval():
    low, high = bootstrap_interval(50, 100)
    assert 0.38 <= low <= 0.42
    assert 0.58 <= high <= 0.62
    assert bootstrap_interval(50, 100) == [low, high]
    assert bootstrap_interval(7, 7) == [1.0, 1.0]
    assert bootstrap_interval(0, 0) is None

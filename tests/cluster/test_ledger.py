"""Who has how many tokens to generate."""

import pickle

from beamwright.cluster.ledger import Given, Ledger


def given(ledger, name, tokens):
    found = Given(name, "1+1", 0, {}, tokens, ledger)
    ledger.enter(found)
    return found


def test_the_one_with_the_fewest_tokens_is_first_not_the_one_with_the_fewest_searches():
    ledger = Ledger()
    ledger.give(given(ledger, "large", 1000), "a")
    for name in ("x", "y"):
        ledger.give(given(ledger, name, 100), "b")
    assert ledger.ranked(["a", "b"]) == ["b", "a"]
    assert ledger.ranked(["a", "b", "c"]) == ["c", "b", "a"]
    assert ledger.loads() == {"a": (1000, 1), "b": (200, 2)}


def test_what_is_done_counts_no_more_and_what_moves_counts_once():
    ledger = Ledger()
    search = given(ledger, "large", 1000)
    ledger.note(search, 100)
    assert ledger.loads() == {}
    ledger.give(search, "a")
    ledger.note(search, 900)
    assert ledger.loads() == {"a": (100, 1)}
    ledger.note(search, 5000)
    assert ledger.loads() == {"a": (0, 1)}
    ledger.give(search, "b")
    assert ledger.loads() == {"b": (1000, 1)}
    ledger.enter(search)
    assert ledger.loads() == {}, "its replica is gone"
    ledger.give(search, "a")
    ledger.take_back(search)
    ledger.take_back(search)
    assert ledger.loads() == {}
    ledger.give(search, "b")
    assert ledger.loads() == {}, "it was cancelled while it was routed"


def test_what_is_expected_follows_what_was():
    ledger = Ledger()
    before = ledger.expected(10, 4, None)
    for _ in range(100):
        ledger.learn(40, 4)
    assert before > ledger.expected(10, 4, None) > 50
    assert round(ledger.expected(10, 4, None)) == 50
    assert ledger.expected(10, 4, 5) == 30


def test_a_search_leaves_the_ledger_behind():
    sent = pickle.loads(pickle.dumps(given(Ledger(), "a", 1)))
    assert (sent.id, sent.ledger) == ("a", None)

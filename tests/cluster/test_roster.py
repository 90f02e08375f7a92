"""Who has how many candidates to write."""

from beamwright.cluster.roster import Heartbeat, Roster, SearchRequest
from beamwright.counters import Counters, Usage


def given(roster, name, n):
    search = SearchRequest(name, "1+1", 0, {}, n, roster)
    roster.add(search)
    return search


def loads(roster):
    return {heartbeat.name: heartbeat.candidates for heartbeat in roster.replicas()}


def test_the_one_with_the_fewest_candidates_is_first_and_what_moves_counts_once():
    roster = Roster()
    used = Usage({}, {"engine": Counters()})
    roster.update(Heartbeat(name, 1, True, used) for name in "ab")
    large = given(roster, "large", 32)
    roster.assign(large, "a")
    for name in ("x", "y"):
        roster.assign(given(roster, name, 8), "b")
    assert loads(roster) == {"a": 32, "b": 16}
    assert roster.ranked(["a", "b", "c"]) == ["c", "b", "a"]
    roster.assign(large, "b")
    assert loads(roster) == {"a": 0, "b": 48}
    roster.add(large)
    assert loads(roster) == {"a": 0, "b": 16}, "its replica is gone"
    roster.remove(large)
    roster.remove(large)
    roster.assign(large, "a")
    assert loads(roster) == {"a": 0, "b": 16}, "it was cancelled while it was routed"

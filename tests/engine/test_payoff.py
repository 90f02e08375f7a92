"""Whether decoding ahead pays, from made-up rounds."""

import pytest

from beamwright.counters import Counters
from beamwright.engine.speculation import Payoff

UNEVEN, EVEN = [10, 20, 30, 140], [30, 31, 32, 30]


def round_of(calls, *, decode_s=1.0, verify_s=0.004, lengths=UNEVEN):
    """What a round of so many calls of the verifier has taken."""
    return Counters(
        decode_s=decode_s,
        verify_s=verify_s,
        verifier_calls=calls,
        scored_tokens=sum(lengths),
    )


def after(rounds, *, of_a_call, of_a_step=0.001, decode_s=1.0, lengths=UNEVEN):
    payoff = Payoff()
    for calls in rounds:
        verify_s = calls * of_a_call + len(lengths) * of_a_step
        spent = round_of(calls, decode_s=decode_s, verify_s=verify_s, lengths=lengths)
        payoff.note_round(lengths, spent, calls)
    return payoff


@pytest.mark.parametrize(
    ("rounds", "of_a_call", "lengths", "pays"),
    [
        ([1], 0.0, UNEVEN, False),  # nothing is known before the second round
        ([1, 1], 0.0, UNEVEN, True),
        ([1, 5], 0.005, UNEVEN, True),
        ([1, 5], 0.5, UNEVEN, False),  # dear calls
        ([1, 5], 0.02, EVEN, False),  # nobody waits for long
        ([1, 5], 0.0, [12, 17, 20, 24], False),  # too short for rows that join
    ],
)
def test_uneven_steps_and_cheap_calls_pay(rounds, of_a_call, lengths, pays):
    assert after(rounds, of_a_call=of_a_call, lengths=lengths).pays is pays


def test_what_is_dropped_makes_it_pay_less():
    payoff = after([1, 5], of_a_call=0.002)
    assert payoff.kept_share == 0.5
    assert payoff.pays
    payoff.speculated = 100_000
    assert payoff.kept_share < 0.01
    assert not payoff.pays


def test_tries_in_vain_end():
    """Steps were scored early, and nothing had room: it pays less with every such round."""
    payoff, tries = after([1], of_a_call=0.0), 0
    for _ in range(200):
        tries += payoff.pays
        asked = 5 if payoff.pays else 1
        payoff.note_round(UNEVEN, round_of(asked), asked)
    assert 0 < tries < 100
    assert not payoff.pays

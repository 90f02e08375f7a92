"""Payoff: whether decoding ahead of selection pays, from what rounds have cost so far.

A round lasts as long as its longest step; the other rows' slots are idle for the rest of it. Tokens
that are written there, and kept, are missing from the next round. What it costs is a call of the
verifier for every few steps that end, in the place of one for all of them, and as often rows join:
that takes about as long as a token of all rows (docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from beamwright.counters import Counters

_MARGIN = 1.25
_CALLS, _TOKENS_PER_CALL = 4, 16  # of a round: slots are filled when a quarter has ended
_LEAST_ROUNDS = 2
_FEW_TOKENS = 500
_HOPE = 0.005
_MOST_REST = 64


@dataclass
class CallCosts:
    """Seconds of calls as a sum of so much for each call and so much for each item in it.

    Least squares through rounds, of which some had several calls.
    """

    calls: float = 0.0
    steps: float = 0.0
    seconds: float = 0.0
    several: bool = False
    _cc: float = 0.0
    _cs: float = 0.0
    _ss: float = 0.0
    _cv: float = 0.0
    _sv: float = 0.0

    def note(self, calls: float, steps: float, seconds: float) -> None:
        """A round's calls, their steps, and what they took."""
        self.calls, self.steps = self.calls + calls, self.steps + steps
        self.seconds += seconds
        self.several = self.several or calls > 1
        self._cc, self._cs, self._ss = (
            self._cc + calls * calls,
            self._cs + calls * steps,
            self._ss + steps * steps,
        )
        self._cv, self._sv = self._cv + calls * seconds, self._sv + steps * seconds

    def add(self, others: CallCosts) -> None:
        """What others have noted counts, too."""
        for each in fields(CallCosts):
            mine, theirs = getattr(self, each.name), getattr(others, each.name)
            setattr(self, each.name, mine or theirs if each.name == "several" else mine + theirs)

    @property
    def of_a_call(self) -> float:
        """Seconds that a call takes whatever is in it; a hopeful guess until any round had two."""
        mean = self.seconds / self.calls if self.calls else 0.0
        spread = self._cc * self._ss - self._cs * self._cs
        if not self.several or spread <= 1e-9 * self._cc * self._ss:
            return _HOPE * mean
        found = (self._cv * self._ss - self._sv * self._cs) / spread
        return min(mean, max(0.0, found))

    @property
    def of_a_step(self) -> float:
        """Seconds that one more in a call takes."""
        rest = self.seconds - self.of_a_call * self.calls
        return max(0.0, rest) / self.steps if self.steps else 0.0


@dataclass
class Rest:
    """Rounds without a try, after one in which steps were scored early and nothing had room.

    rounds: still to come. Twice as many after every try in vain.
    """

    rounds: int = 0
    _next: int = 1
    _asked: int = 0
    _speculated: int = 0

    def note(self, asked: int, speculated: int) -> None:
        """A round is over.

        asked: how often the verifier was. speculated: tokens decoded ahead so far, up to the round
        before it.
        """
        self.rounds = max(0, self.rounds - 1)
        if self._asked > 1:
            in_vain = speculated == self._speculated
            if in_vain:
                self.rounds, self._next = self._next, min(_MOST_REST, 2 * self._next)
            else:
                self._next = 1
        self._asked, self._speculated = asked, speculated


@dataclass
class Payoff:
    """Adds up rounds: what they cost, of trees that were alone in flight.

    speculated, kept: tokens that were decoded ahead, and those that selection has opened.
    decoding: passes of the generator, as calls with so many rows. idle, idle_fills: slots that
    the rows of a round had left, in tokens, and how often such are filled, of trees beside others.
    pressed: of late, KV has had to leave the device while several were in flight.
    waited: tokens that the longest steps had more than the mean ones; tokens, decode_s: of the
    longest steps, and what their rounds took.
    """

    speculated: int = 0
    kept: int = 0
    rounds: int = 0
    waited: float = 0.0
    fills: float = 0.0
    scoring: CallCosts = field(default_factory=CallCosts)
    decoding: CallCosts = field(default_factory=CallCosts)
    idle: int = 0
    idle_fills: float = 0.0
    pressed: bool = False
    decode_s: float = 0.0
    tokens: int = 0
    _rest: Rest = field(default_factory=Rest)

    def note_round(self, lengths: Sequence[int], spent: Counters, asked: int) -> None:
        """A round of steps of these lengths is over.

        spent: on it, and on what was decoded and scored ahead meanwhile. asked: how often the
        verifier was asked about its steps: more than once if some were scored early.
        """
        longest = max(lengths)
        self.rounds += 1
        self._rest.note(asked, self.speculated)
        self.waited += longest - sum(lengths) / len(lengths)
        self.fills += _fills(longest)
        self.scoring.note(spent.verifier_calls, spent.scored_tokens, spent.verify_s)
        self.decode_s, self.tokens = self.decode_s + spent.decode_s, self.tokens + longest

    @contextmanager
    def noting(self, counts: Counters) -> Iterator[None]:
        """Note the generator's passes meanwhile, and what they take, by these counters."""
        before = counts.copy()
        yield
        spent = counts - before
        self.note_passes(spent.steps, spent.row_tokens, spent.decode_s + spent.both_s)

    def note_passes(self, passes: float, row_tokens: float, seconds: float) -> None:
        """The generator has made so many passes, which wrote so many tokens."""
        if passes > 0:
            self.decoding.note(passes, row_tokens, seconds)

    def note_beside(self, lengths: Sequence[int]) -> None:
        """A round of steps of these lengths is over, of a tree beside others."""
        longest = max(lengths)
        self.idle += longest * len(lengths) - sum(lengths)
        self.idle_fills += _fills(longest)

    @property
    def kept_share(self) -> float:
        """Of what is decoded ahead; a half until something is known."""
        return (self.kept + _FEW_TOKENS / 2) / (self.speculated + _FEW_TOKENS)

    @property
    def pays(self) -> bool:
        """True if what is won is more than what it costs, with a margin."""
        token_s = self.decode_s / max(1, self.tokens)
        gain_s = self.kept_share * self.waited * token_s
        cost_s = self.fills * (self.scoring.of_a_call + token_s)
        ready = self.rounds >= _LEAST_ROUNDS and not self._rest.rounds
        return ready and gain_s > _MARGIN * cost_s

    def pays_beside(self, num_rows: int) -> bool:
        """True if the same holds beside other trees, where so many rows share each pass.

        A token that is kept saves its share of a later pass; one that is not costs a row in this.
        """
        per_row_s = self.decoding.of_a_step
        pass_s = self.decoding.of_a_call / max(1, num_rows)
        calls_s = self.idle_fills / max(1, self.idle) * (self.scoring.of_a_call + pass_s)
        gain_s = self.kept_share * pass_s
        cost_s = (1 - self.kept_share) * per_row_s + calls_s
        return self.decoding.several and not self.pressed and gain_s > _MARGIN * cost_s


def _fills(longest: int) -> float:
    """How often slots are filled in a round whose longest step has so many tokens."""
    return _CALLS + longest / _TOKENS_PER_CALL

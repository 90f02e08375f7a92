"""What the engine is doing, for whoever shows it. No torch; nothing ever comes back from it."""

from __future__ import annotations


class Progress:
    """Hears of phases and tokens. This one does nothing; a subclass shows them.

    Called between iterations, from the thread that works. Policies neither see nor steer it.
    """

    def doing(self, what: str) -> None:
        """A phase begins: "loading the verifier bundled", "round 3: decoding 16 beams"."""

    def wrote(self, num_tokens: int) -> None:
        """So many tokens were decoded, of all beams together."""

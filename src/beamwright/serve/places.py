"""Where every segment's KV is at the moment, for the page: a timeline that keeps no history."""

from __future__ import annotations

from beamwright.runtime.timeline import NullTimeline


class Places(NullTimeline):
    """Give it to the Solver as its timeline, and `place` to the feed.

    Segments are the dotted lineages of their nodes, the problem's id in front.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, str] = {}

    def residence(self, segment: str, change: str) -> None:
        """From now on it is there. Called by any thread; each step is one of a dictionary's."""
        if change == "none":
            self._places.pop(segment, None)
        else:
            self._places[segment] = change

    def place(self, segment: str) -> str | None:
        """`device`, `host` or `both`; None for what has no KV."""
        return self._places.get(segment)
